"""Peaks of allocation."""

from __future__ import annotations

import gc

import pytest
import torch

from zerofx.peaks import CpuPeak


def test_the_peak_is_that_of_allocations() -> None:
    with CpuPeak() as peak:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(500, dtype=torch.uint8)
        del first
        third = torch.empty(600, dtype=torch.uint8)
    assert peak.num_bytes == 1500
    assert second.numel() + third.numel() == 1100


def test_the_profiler_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with CpuPeak():
        torch.empty(1)
    assert capfd.readouterr() == ("", "")


def test_garbage_of_an_earlier_block_is_not_counted_as_memory_returned() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000)  # so that what is garbage stays
    try:
        with CpuPeak():
            garbage: list[object] = [torch.ones(1 << 20)]
        garbage.append(garbage)
        with CpuPeak() as peak:
            del garbage
            gc.set_threshold(1)
            containers = [[torch.ones(64)] for _ in range(8)]
    finally:
        gc.set_threshold(*threshold)
    assert peak.num_bytes == sum(tensor.untyped_storage().nbytes() for (tensor,) in containers)


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        with pytest.raises(KeyError), CpuPeak():
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        gc.enable() if before else gc.disable()
