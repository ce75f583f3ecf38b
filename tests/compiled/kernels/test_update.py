"""One pass over an update: every optimizer's arithmetic as torch has it, and a reason where there is no kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled.kernels.conftest import Interpret
from tests.compiled.kernels.interpreted import region_of, trained
from tests.lib.optimizers import CASES, FUSED_CASES, program_of
from zerofx.codegen.kernels.update import BLOCK, make_update_kernel
from zerofx.codegen.kernels.update_writer import NoKernelError

aten = torch.ops.aten


def check(interpret: Interpret, case: str, fused: bool, low: torch.dtype, numel: int, num_steps: int) -> None:
    for _, expected, found in interpret(trained, case, fused, low, numel, num_steps):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_optimizers(interpret: Interpret, case: str) -> None:
    check(interpret, case, False, torch.bfloat16, BLOCK + 37, 3)


@pytest.mark.parametrize("case", FUSED_CASES)
def test_an_update_is_that_of_torchs_fused_kernel(interpret: Interpret, case: str) -> None:
    check(interpret, case, True, torch.bfloat16, BLOCK + 37, 3)


@settings(max_examples=6, deadline=None)
@given(
    case=st.sampled_from(["adamw", "sgd_nesterov", "lion"]),
    low=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    numel=st.integers(1, 3 * BLOCK),
)
def test_lengths_and_dtypes(interpret: Interpret, case: str, low: torch.dtype, numel: int) -> None:
    check(interpret, case, case == "adamw", low, numel, 2)


def test_steps_late_in_a_training_are_corrected_as_exactly(interpret: Interpret) -> None:
    # From beta1**step = exp(-0.5) on, in step 5, the difference is taken as it stands, before that by its series.
    check(interpret, "adamw", True, torch.float32, 5, 12)


def test_what_nothing_reads_later_is_not_stored() -> None:
    inputs = [torch.zeros(8), torch.zeros(8), (0.1,)]
    kept = make_update_kernel(_sgd, inputs)
    dying = make_update_kernel(_sgd, inputs, dying={1})
    assert "tl.store(x1" in kept.source and "tl.store(x1" not in dying.source
    assert "tl.store(x0" in dying.source


def _sgd(inputs: list[Any]) -> tuple[()]:
    param, grad, hyper = inputs
    inputs.clear()
    aten.mul_.Tensor(grad, 0.5)
    aten.add_.Tensor(param, grad, alpha=hyper[0])
    return ()


def test_each_value_is_read_and_written_once() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    program = program_of(optimizer, fused=True)
    low = torch.bfloat16
    flat = [torch.zeros(8), torch.zeros(8, dtype=low), torch.zeros(8), torch.zeros(8)]
    inputs = [*flat, torch.tensor(0.0), torch.zeros(8, dtype=low), (0.1,) * program.num_scalars]
    source = make_update_kernel(region_of(program, low), inputs, dying={1}).source
    assert [source.count(f"tl.load(x{n} + at") for n in range(6)] == [1, 1, 1, 1, 0, 0]
    assert [source.count(f"tl.store(x{n} + at") for n in range(6)] == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("operator", "inputs", "reason"),
    [
        (lambda x, _: aten.cumsum.default(x, 0), [torch.zeros(4), torch.zeros(4)], "no line of its own"),
        (lambda x, y: aten.add_.Tensor(x, y), [torch.zeros(4), torch.zeros(5)], "4, 5"),
        (lambda x, y: aten.add_.Tensor(x, y), [torch.zeros(4).double(), torch.zeros(4).double()], "float64"),
        (lambda x, y: aten.add_.Tensor(x, y), [torch.zeros(2, 2), torch.zeros(2, 2)], "not flat"),
        (lambda x, y: aten.add.Tensor(x, y), [torch.zeros(4), torch.zeros(4)], "changes nothing"),
        (lambda x, y: aten.pow_.Scalar(x, 1.7), [torch.zeros(4), torch.zeros(4)], "exponent 1.7"),
    ],
)
def test_what_is_no_elementwise_update_has_a_reason(operator: Any, inputs: list[Any], reason: str) -> None:
    def region(given: list[Any]) -> tuple[()]:
        operator(*given)
        return ()

    with pytest.raises(NoKernelError, match=reason):
        make_update_kernel(region, inputs)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.1, "0.1"), (1e-45, "0.0"), (-1e300, 'float("-inf")'), (float("nan"), 'float("nan")')],
)
def test_numbers_are_float32s(number: float, text: str) -> None:
    def region(given: list[Any]) -> tuple[()]:
        aten.mul_.Tensor(given[0], number)
        return ()

    assert f"* {text}\n" in make_update_kernel(region, [torch.zeros(4)]).source


def test_a_value_that_is_read_later_has_a_reason() -> None:
    with pytest.raises(NoKernelError, match="read later"):
        make_update_kernel(lambda given: (aten.add.Tensor(*given),), [torch.zeros(4), torch.zeros(4)])
