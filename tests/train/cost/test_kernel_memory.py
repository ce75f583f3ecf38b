"""What kernels take, found by calling them with values that are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from tests.train.cost.test_workspace import call, rand
from zerofx.scheduler.cost.cpu import kernel_memory
from zerofx.scheduler.cost.cpu.kernel_memory import kernel_memories
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.torch_private.operators import disable_onednn

aten = torch.ops.aten


def measured_bytes(node: fx.Node) -> int | None:
    found = kernel_memories([node])[node]
    return None if found is None else found.inside


def test_random_numbers_are_drawn_as_if_nothing_had_been_called() -> None:
    node = call(aten.normal.Tensor_float, (rand(64, 64), 1.0))
    before = torch.get_rng_state()
    assert measured_bytes(node) == 64 * 64 * 4
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_written_in_place_stays_as_it_is() -> None:
    value = rand(64)
    node = call(aten.erfinv_.default, (value,))
    before = value.clone()
    assert measured_bytes(node) == 0
    assert torch.equal(value, before)


@pytest.mark.parametrize("square", [64, 512])
def test_an_output_may_keep_more_than_it_shows(square: int) -> None:
    values = torch.empty(square, square)
    for target in (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default):
        node = call(target, (values, values))
        found = kernel_memories([node])[node]
        assert found is not None and found.excess == (values.nbytes - 4,)


def test_what_is_found_holds_for_the_library_that_has_the_kernel() -> None:
    images, filters, pair = torch.empty(4, 16, 32, 32), torch.empty(16, 16, 3, 3), [1, 1]
    node = call(aten.convolution.default, (images, filters, None, pair, pair, pair, True, [0, 0], 1))
    with_onednn = measured_bytes(node)
    with disable_onednn():
        without = measured_bytes(node)
        kernel_memory._memory_cache.cache_clear()
        assert measured_bytes(node) == without != with_onednn
    assert measured_bytes(node) == with_onednn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "wide", "narrow"), [(97, 64, 32), (128, 16, 64)])
def test_products_of_groups_hold_no_more_whatever_the_groups_are(
    dtype: torch.dtype, num_rows: int, wide: int, narrow: int
) -> None:
    """And as much for some number of rows: a bound that is met."""
    x, y = rand(num_rows, wide, dtype=dtype), rand(num_rows, narrow, dtype=dtype)
    for weights in (rand(2, wide, narrow, dtype=dtype), rand(2, narrow, wide, dtype=dtype).mT):
        for left, right in ((x, weights), (y, weights.mT), (x.t(), y)):
            ends = [torch.full((2,), rows, dtype=torch.int32) for rows in range(num_rows + 1)]
            results = [aten._grouped_mm.default(left, right, end) for end in ends]
            with CpuPeak() as peak:
                for end in ends:
                    with peak.part():
                        aten._grouped_mm.default(left, right, end)
            assert max(peak.parts) - results[0].nbytes == measured_bytes(
                call(aten._grouped_mm.default, (left, right, ends[0]))
            )


def test_calls_that_give_other_sizes_for_values_made_up_are_not_known() -> None:
    assert measured_bytes(call(aten.nonzero.default, (torch.zeros(4),))) is None


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("none"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("place", ["_values", "memory_of"])
def test_a_call_without_memory_is_made_another_time(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = call(aten.kthvalue.default, (torch.empty(40, 41), 3))
    kernel_memory._memory_cache.cache_clear()

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(kernel_memory, place, fail)
        assert measured_bytes(node) is None
    assert measured_bytes(node) == 40 * 41 * 12


def test_a_profiler_that_fails_does_not_make_an_operator_one_that_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = call(aten.kthvalue.default, (torch.empty(40, 43), 3))

    def fail(_: CpuPeak) -> CpuPeak:
        raise RuntimeError("cannot start")

    with monkeypatch.context() as patch:
        patch.setattr(CpuPeak, "__enter__", fail)
        assert measured_bytes(node) is None
    assert measured_bytes(node) == 40 * 43 * 12


def test_a_call_that_refuses_values_made_up_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = call(aten.kthvalue.default, (torch.empty(40, 47), 3))

    def fail(*_: Any) -> Any:
        raise RuntimeError("not positive-definite")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_memory, "_values", fail)
        assert measured_bytes(node) is None
    assert measured_bytes(node) is None
    kernel_memory._memory_cache.cache_clear()


def test_it_can_be_asked_among_fake_tensors() -> None:
    with FakeTensorMode():
        node = call(aten.kthvalue.default, (torch.empty(96, 160), 3))
        assert measured_bytes(node) == 96 * 160 * 12
