"""Peaks of allocation."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.torch_private.profiler import is_profiling


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


class Distances(nn.Module):
    """Calls an operator whose memory is found by calling its kernel; ``width`` is another one for each test."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x), x).mean()


def _distances(width: int) -> tuple[zerofx.Step, Tensor]:
    model = Distances(width)
    return zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager"), torch.randn(8, width)


def _scheduled(wait: int, warmup: int) -> torch.profiler.profile:
    # Without acc_events torch warns, and an error in the middle of it is a crash when the block ends.
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=1, repeat=1), acc_events=True
    )


def test_a_profiler_is_seen_while_it_records_and_while_it_warms_up() -> None:
    assert not is_profiling()
    with _scheduled(wait=1, warmup=1) as scheduled:
        seen = [is_profiling()]
        for _ in range(3):
            scheduled.step()
            seen.append(is_profiling())
    assert seen == [False, True, True, False]
    scheduled = _scheduled(wait=0, warmup=1)
    scheduled.start()
    assert is_profiling()
    scheduled.stop()
    assert not is_profiling()
    with torch.autograd.profiler.profile():
        assert is_profiling()


def test_a_first_step_in_a_profile_leaves_it_as_it_is_and_is_not_remembered() -> None:
    step, x = _distances(33)
    with torch.profiler.profile() as profile:
        step(x)
        assert "the predicted peak lacks what" in str(step)
    assert any("cdist" in event.key for event in profile.key_averages())
    again, x = _distances(33)
    again(x)
    assert "the predicted peak lacks what" not in str(again)


def test_a_first_step_while_a_profile_warms_up_leaves_it_as_it_is() -> None:
    step, x = _distances(34)
    found = []
    with _scheduled(wait=0, warmup=1) as profile:
        profile.on_trace_ready = lambda one: found.append([event.key for event in one.key_averages()])
        for _ in range(2):
            step(x)
            profile.step()
    assert any("cdist" in key for key in itertools.chain(*found))


def _refused(call: Callable[[], Any], profiled: bool) -> tuple[str, bool]:
    """The refusal, and whether a profile around it has what ran."""
    if not profiled:
        with pytest.raises(zerofx.UsageError) as caught:
            call()
        return str(caught.value), True
    with torch.profiler.profile() as profile:
        torch.ones(3).square()
        with pytest.raises(zerofx.UsageError) as caught:
            call()
    return str(caught.value), any("square" in event.key for event in profile.key_averages())


def _measure_where_rank_0_is_profiled(width: int) -> list[tuple[str, bool]]:
    step, x = _distances(width)
    profiled = not dist.is_initialized() or dist.get_rank() == 0
    before = {name: tensor.clone() for name, tensor in step.model.named_parameters()}
    found = [_refused(lambda: step.measure(x), profiled)]
    assert all(torch.equal(before[name], tensor) for name, tensor in step.model.named_parameters())
    model = Distances(width)
    optimizer = torch.optim.SGD(model.parameters())
    found.append(_refused(lambda: zerofx.tune(model, optimizer, (x,), backend="eager"), profiled))
    step(x)
    assert step.measure(x, num_steps=1).peak_bytes["device"] > 0
    return found


def test_what_measures_is_refused_in_a_profile_which_stays_as_it_is() -> None:
    for message, kept in _measure_where_rank_0_is_profiled(35):
        assert message.startswith("expected no profiler to run") and "on rank" not in message
        assert kept


def test_a_profile_of_one_rank_has_all_ranks_refuse() -> None:
    for found in run_ranks(_measure_where_rank_0_is_profiled, 2, 36):
        for message, kept in found:
            assert "found one that runs or warms up on rank 0: " in message
            assert kept


def _step_where_rank_0_is_profiled() -> list[float]:
    step, x = _distances(37)
    if dist.get_rank() > 0:
        return [step(x).item(), step(x).item()]
    with torch.profiler.profile():
        return [step(x).item(), step(x).item()]


def test_a_profile_of_one_rank_does_not_keep_the_others_from_the_same_step() -> None:
    assert len(run_ranks(_step_where_rank_0_is_profiled, 2)) == 2
