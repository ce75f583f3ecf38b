"""Weights handed out one by one: names and values of the whole state, a bucket at a time, all or those that changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.evaluating import own_batches, step_of_case
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import world
from zerofx import RankMismatchError, UsageError


def _unlike(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype | None) -> list[str]:
    wrong = [] if found.keys() == expected.keys() else [f"other names: {found.keys() ^ expected.keys()}"]
    for name in found.keys() & expected.keys():
        cast = expected[name].to(dtype) if dtype is not None and expected[name].is_floating_point() else expected[name]
        wrong += (
            [] if torch.equal(found[name].cpu(), cast) and found[name].dtype == cast.dtype else [f"{name} is another"]
        )
    return wrong


def _bytes_alive() -> int:
    gc.collect()
    kinds = (Tensor, nn.Parameter)
    storages = [
        each.untyped_storage() for each in gc.get_objects() if type(each) in kinds and each.device.type == "cpu"
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _wrong(name: str, stage: int, options: dict[str, Any], *, counts: bool = False) -> list[str]:
    """What is wrong with weights that are handed out, in words."""
    case, (rank, num_ranks) = CASES[name], world()
    first, second = own_batches(case, rank // options.get("mesh", {}).get("model", 1), 2)
    step = step_of_case(case, stage, **options)
    step(*first[0], **first[1])
    expected, wrong = step.full_state_dict(), list[str]()
    for dtype in (None, torch.bfloat16):
        wrong += _unlike({n: t.clone() for n, t in step.weights(dtype=dtype)}, expected, dtype)
    mine = {n: t.clone() for n, t in step.weights(rank=num_ranks - 1)}
    wrong += _unlike(mine, expected if rank == num_ranks - 1 else {}, None)
    wrong += [] if dict(step.weights(changed=True)).keys() == expected.keys() else ["not all the first time"]
    wrong += [f"{n} has not changed" for n, _ in step.weights(changed=True)]
    step(*second[0], **second[1])
    now = step.full_state_dict()
    changed = {n for n in now if not torch.equal(now[n], expected[n])}
    wrong += [] if {n for n, _ in step.weights(changed=True)} == changed else ["other changes"]
    for n, tensor in step.weights():
        tensor.zero_()  # which is nobody's
        wrong += [] if n in now else [n]
    again = step.full_state_dict()
    wrong += [f"{n} was written" for n in now if not torch.equal(again[n], now[n])]
    if counts:  # which takes long
        taken = step._steps.taken
        assert taken is not None
        largest = max(bucket.numel * bucket.dtype.itemsize for bucket in taken.layout.buckets)
        before = _bytes_alive()
        most = max(_bytes_alive() - before for _ in step.weights())
        wrong += (
            [] if 0 < most <= largest + 64 else [f"{most} bytes beyond what is held, the largest bucket has {largest}"]
        )
    with pytest.raises(UsageError, match="no step while weights are read"):
        [step(*second[0], **second[1]) for _ in step.weights()]
    if num_ranks > 1:
        with pytest.raises(RankMismatchError, match="weights"):
            step.weights(dtype=torch.bfloat16 if rank else None)
    with pytest.raises(UsageError, match="found torch"):
        step.weights(dtype=torch.int8)
    with pytest.raises(UsageError, match=rf"one of {num_ranks} ranks, found {num_ranks}"):
        step.weights(rank=num_ranks)
    step.close()
    return [f"{name} at stage {stage}, {options}: {each}" for each in wrong]


CASES_OF_RANKS: list[tuple[str, int, dict[str, Any]]] = [
    ("batchnorm", 0, {}), ("gpt", 1, {"precision": "bf16"}), ("frozen", 2, {}), ("gpt", 3, {"precision": "bf16"}),
]  # fmt: skip


def _run(cases: list[tuple[str, int, dict[str, Any]]]) -> list[str]:
    return [each for case in cases for each in _wrong(*case)]


@pytest.mark.days(3)
def test_one_process_hands_out_its_weights() -> None:
    sliced: tuple[str, int, dict[str, Any]] = ("gpt", 3, {"tile": {"tokens.weight": 2}})
    assert _run([*CASES_OF_RANKS, sliced]) == [] == _wrong("gpt", 3, {}, counts=True)


@pytest.mark.parametrize("cases", [CASES_OF_RANKS, [("gpt", 3, {"mesh": {"model": 2}, "machine": SHARING})]])
def test_ranks_hand_out_the_same(cases: list[tuple[str, int, dict[str, Any]]]) -> None:
    assert run_ranks(_run, 2, cases) == [[], []]


@pytest.mark.slow
def test_four_ranks_hand_out_the_same() -> None:
    of_two_axes = ("gpt", 3, {"mesh": {"shard": 2, "model": 2}, "machine": SHARING})
    assert run_ranks(_run, 4, [*CASES_OF_RANKS, of_two_axes]) == [[]] * 4


def _count_on_ranks() -> list[str]:
    return _wrong("gpt", 3, {}, counts=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_hold_one_bucket_more_while_they_hand_them_out(num_ranks: int) -> None:
    assert run_ranks(_count_on_ranks, num_ranks) == [[]] * num_ranks
