"""Optimizers of torchao and bitsandbytes whose states have 8 or 4 bits: codes, scales and parameters of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.lib.distributed import run_ranks
from tests.lib.runs.whole_optimizers import IN_FEW_BITS
from tests.lib.runs.whole_updates import WholeCase, compiled, differences_of, resumed_differences
from zerofx.optimizers.whole.states import split_tensors

STAGES = (0, 1, 2, 3)
# torchao compiles its update for each shape, which takes seconds.
Stance = Literal["default", "force_eager"]


def _cases(library: str, names: list[str], *, every: bool) -> list[WholeCase]:
    pytest.importorskip(library, reason="its optimizers are what is compared")
    chosen = [f"{library} {name}" for name in names]
    return [WholeCase(name, {"stage": stage}, steps=3) for name in chosen for stage in (STAGES if every else (3,))]


def _all_differences(cases: list[WholeCase], stance: Stance) -> list[str]:
    with torch.compiler.set_stance(stance):
        return [text for case in cases for text in differences_of(case)]


def _resumed(folder: str, case: WholeCase) -> list[str]:
    with torch.compiler.set_stance("force_eager"):
        return resumed_differences(folder, case, 2)


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_codes_scales_and_parameters_are_those_of_one_process(num_ranks: int, library: str) -> None:
    assert (
        run_ranks(_all_differences, num_ranks, _cases(library, ["AdamW8bit"], every=False), "force_eager")
        == [[]] * num_ranks
    )


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_kinds_at_all_stages_are_those_of_one_process(num_ranks: int, library: str) -> None:
    kinds = [name.partition(" ")[2] for name in IN_FEW_BITS if name.startswith(library)]
    assert run_ranks(_all_differences, num_ranks, _cases(library, kinds, every=True), "default") == [[]] * num_ranks


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 4), (4, 2)))]
)
def test_codes_are_saved_and_go_on_on_other_ranks(tmp_path: Path, library: str, before: int, after: int) -> None:
    (case,) = _cases(library, ["AdamW8bit"], every=False)
    assert run_ranks(_resumed, before, str(tmp_path), case) == [[]] * before
    assert run_ranks(_resumed, after, str(tmp_path), case) == [[]] * after


def _numbers_of_codes(case: WholeCase) -> list[int]:
    """The parameters, by number, that have a state of bytes."""
    step, optimizer = compiled(case)
    with torch.compiler.set_stance("force_eager"):
        step(case.batches(1)[0][0])
    entries = optimizer.state_dict()["state"]
    step.close()
    return sorted(number for number, entry in entries.items() if torch.uint8 in _dtypes(entry))


def _dtypes(entry: object) -> set[torch.dtype]:
    return {tensor.dtype for tensor in split_tensors(entry)[1].values()}


@pytest.mark.parametrize(("library", "expected"), [("torchao", [1, 3]), ("bitsandbytes", [1, 2, 3, 4])])
def test_a_parameter_has_codes_by_its_own_size_and_not_by_that_of_a_slice(library: str, expected: list[int]) -> None:
    (case,) = _cases(library, ["AdamW8bit"], every=False)
    assert run_ranks(_numbers_of_codes, 2, case) == [expected] * 2
