"""The largest micro-batch and the fewest ranks that fit: against plans made one by one, and against ZeRO's facts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.budgets import WAVE_WIDTH as WIDTH
from tests.lib.budgets import Chain, Waves, least_and_most, least_bytes, planned, small_machine
from tests.lib.chains import Stack
from zerofx import Machine, MemoryBudgetError, SearchResult, UsageError, largest_micro_batch, smallest_world
from zerofx.capture.by_layer.by_layer import capture_by_layer
from zerofx.choices import RecomputeOption, Tiling
from zerofx.driver import captures as driver_captures
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.search.prefixes import Prefixes

DEPTH = 6
NODE = 4  # ranks a node of the machine


def machine(memory_kib: int) -> Machine:
    cpu = Machine.named("cpu")
    device = replace(cpu.device, memory_bytes=memory_kib * 1024)
    return replace(cpu, name="cpu-small", ranks_per_node=NODE, device=device)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    # The model's states take most of the memory at small batches.
    model = Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    return model, torch.optim.Adam(model.parameters())


def rows(number: int) -> tuple[Tensor, ...]:
    return (torch.empty(number, WIDTH, device="meta"),)


def peak(samples: int = 8, world_size: int = 1) -> int:
    """Of stage 3 without recomputation and prefetch."""
    made = zerofx.plan(*training(), rows(samples), world_size=world_size, machine="cpu", backend="eager", prefetch=0)
    return made.plan.peak_bytes["device"]


def fewest(memory_kib: int, stage: int = 3, limit: int = 64) -> SearchResult:
    """With whole parameters: slices would need fewer."""
    return smallest_world(
        *training(), rows(8), stage, machine=machine(memory_kib), backend="eager", tile="none", limit=limit
    )


@functools.cache
def found_fewest(memory_kib: int, stage: int = 3) -> SearchResult:
    """What ``fewest`` finds; to be read only."""
    return fewest(memory_kib, stage)


@functools.cache
def most_samples(tile: Tiling) -> tuple[SearchResult, list[int]]:
    """The largest micro-batch of 420 KiB without recomputation, and those that were made; to be read only."""
    asked: list[int] = []

    def make_batch(number: int) -> tuple[Tensor, ...]:
        asked.append(number)
        return rows(number)

    options: dict[str, Any] = {"machine": machine(420), "backend": "eager", "recompute": "none", "tile": tile}
    return largest_micro_batch(make_batch, *training(), **options), asked


def check_consistent(result: SearchResult) -> None:
    """What was tried is what the answer rests on."""
    values = [trial.value for trial in result.tried]
    assert len(set(values)) == len(values), "a value is tried once"
    assert all(trial.fits == (trial.peak_bytes <= result.limit_bytes) for trial in result.tried)
    answer = next(trial for trial in result.tried if trial.value == result.value)
    assert answer.fits and answer.peak_bytes == result.planned.plan.peak_bytes["device"]
    assert result.planned.fits


@pytest.mark.days(3)
def test_one_more_sample_does_not_fit() -> None:
    result, asked = most_samples("none")
    assert peak(result.value) <= 420 * 1024 < peak(result.value + 1)
    assert result.value not in (1, 2, 4, 8, 16, 32, 64), "it took bisection"
    assert asked == [trial.value for trial in result.tried], "each batch is made, and captured, once"
    assert any(trial.value == result.value + 1 and not trial.fits for trial in result.tried)
    check_consistent(result)


@pytest.mark.days(3)
def test_the_budget_is_what_counts_when_there_is_one() -> None:
    results = [
        largest_micro_batch(
            rows, *training(), limit=8, machine=machine(360), memory_budget=budget, backend="eager", tile="none"
        )
        for budget in ("346KiB", 0.97, None)
    ]
    assert [result.limit_bytes for result in results] == [346 * 1024, int(0.97 * 360 * 1024), 360 * 1024]
    values = [result.value for result in results]
    assert values == sorted(values) and values[0] < values[-1]
    for result in results:
        check_consistent(result)
        assert result.planned.plan.memory_budget == result.limit_bytes


@pytest.mark.days(3)
def test_recomputation_makes_room_for_samples() -> None:
    model = Waves()
    optimizer = torch.optim.SGD(model.parameters())
    choices: tuple[RecomputeOption, ...] = ("none", "auto")
    without, with_it = (
        largest_micro_batch(
            rows, model, optimizer, limit=64, machine=machine(256), backend="eager", recompute=recompute, tile="none"
        )
        for recompute in choices
    )
    assert without.value < with_it.value
    assert with_it.planned.plan.recomputes and not without.planned.plan.recomputes


def test_a_limit_ends_the_search() -> None:
    result = largest_micro_batch(rows, *training(), limit=6, machine=machine(8 * 1024), backend="eager")
    assert [trial.value for trial in result.tried] == [1, 2, 4, 6]
    assert result.value == 6


@pytest.mark.days(3)
def test_slices_make_room_for_samples() -> None:
    (without, _), (with_it, _) = most_samples("none"), most_samples("auto")
    assert with_it.value > without.value and with_it.planned.plan.slices and not without.planned.plan.slices


def test_not_even_one_sample() -> None:
    with pytest.raises(MemoryBudgetError, match=r"micro-batch of 1 .*least possible is .*optimizer"):
        largest_micro_batch(rows, *training(), machine=machine(100), backend="eager")


@pytest.mark.days(3)
def test_fewer_ranks_do_not_fit() -> None:
    result = found_fewest(190)
    assert result.value == 3 and [trial.value for trial in result.tried] == [1, 2, 4, 3]
    check_consistent(result)
    assert not any(trial.fits for trial in result.tried if trial.value < result.value)


def test_past_a_node_there_are_whole_nodes() -> None:
    memory_kib = peak(world_size=8) // 1024  # enough for six whose reductions are awaited at once
    pairs = replace(machine(memory_kib), ranks_per_node=2)
    result = smallest_world(
        *training(), rows(8), machine=pairs, backend="eager", recompute="none", tile="none", prefetch=0
    )
    assert [trial.value for trial in result.tried] == [1, 2, 4, 8, 6]
    assert result.value == 6
    check_consistent(result)


@pytest.mark.days(3)
@pytest.mark.captures
def test_the_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []

    def counted(*args: Any, **kwargs: Any) -> StepGraph:
        captures.append(args)
        return capture_by_layer(*args, **kwargs)

    monkeypatch.setattr(driver_captures, "capture_by_layer", counted)
    assert len(fewest(190).tried) > 1
    assert len(captures) == 1


@pytest.mark.days(3)
def test_more_memory_never_needs_more_ranks() -> None:
    values = [found_fewest(kib).value for kib in (160, 260, 360)]
    assert values == sorted(values, reverse=True) and values[-1] == 1 < values[0]


@pytest.mark.days(3)
def test_stage_3_needs_fewer_ranks_than_stage_1() -> None:
    # ZeRO: whole parameters and gradients stay at stage 1, so its memory has a floor that stage 3 does not have.
    one, three = found_fewest(235, stage=1), found_fewest(235)
    assert three.value < one.value
    with pytest.raises(MemoryBudgetError, match=r"up to 16 ranks of cpu-small at stage 1 to be enough.*stage=3"):
        fewest(160, stage=1, limit=16)
    assert found_fewest(160).value <= NODE


def test_stage_0_gains_nothing_from_ranks() -> None:
    with pytest.raises(MemoryBudgetError, match="with 1 of them"):
        fewest(320, stage=0, limit=8)


@pytest.mark.days(3)
def test_a_limit_within_a_node() -> None:
    with pytest.raises(MemoryBudgetError, match="up to 2 ranks"):
        fewest(190, limit=2)
    assert fewest(190, limit=3).value == 3


def test_a_plan_that_was_found_is_the_plan_that_is_made() -> None:
    result = found_fewest(190)
    again = zerofx.plan(
        *training(), rows(8), world_size=result.value, machine=machine(190), memory_budget=1.0, backend="eager",
        tile="none",
    )  # fmt: skip
    assert again.plan == result.planned.plan


def test_the_table_says_what_was_tried() -> None:
    lines = str(found_fewest(190)).splitlines()
    assert lines[0].startswith("ranks 3: stage 3 on 3 x cpu-small: peak ")
    assert lines[2].split() == ["ranks", "peak", "of", "190.0", "KiB"]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2", "3", "4"]
    assert "at least" in lines[4] and lines[4].endswith("does not fit")
    assert lines[6].split()[-2:] == ["fits", "<-"]


def test_a_short_search_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    fewest(360)
    assert capfd.readouterr() == ("", "")


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="limit of at least 1, found 0"):
        fewest(190, limit=0)
    with pytest.raises(UsageError, match="limit of at least 1, found True"):
        largest_micro_batch(rows, *training(), limit=True)
    with pytest.raises(UsageError, match="no world_size for smallest_world"):
        smallest_world(*training(), rows(8), world_size=2)  # type: ignore[call-arg]  # which it looks for itself
    with pytest.raises(UsageError, match="world_size to be a number of ranks, 1 or more"):
        largest_micro_batch(rows, *training(), world_size=0)


@pytest.mark.days(3)
def test_gathers_stay_ahead_where_that_is_faster_than_the_memory_they_free_is_worth() -> None:
    machine = small_machine(1e9)
    machine = replace(machine, intra_node=replace(machine.intra_node, bandwidth=3e8))
    model, batch = Chain(32, ("linear", "tanh", "linear"), 6), (torch.randn(24, 32),)
    options: dict[str, Any] = {"machine": machine, "stage": 3, "world_size": 4}
    least, most = least_and_most(model, batch, **options)
    budget = (least + most) // 2
    plan = planned(model, batch, budget, **options)
    without = planned(model, batch, budget, prefetch=0, **options)
    assert plan.peak_bytes["device"] <= budget and plan.step_seconds < 0.95 * without.step_seconds
    later, ahead = (sum("ahead to overlap" in gather.reason for gather in each.gathers) for each in (without, plan))
    assert later == 0 and ahead > 0


class Tabled(nn.Module):
    """Layers that write a large table each, and read it: its next value stays until nothing reads the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for number in range(2):
            self.register_buffer(f"table_{number}", torch.zeros(512, 8))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x))[:, None] * torch.ones(8)
        for number, layer in enumerate(self.layers):
            table = self.get_buffer(f"table_{number}")
            table[: len(x)] = places
            y, later = torch.tanh(layer(x)), table[: len(x)].detach()
            x = (x * places.cos() + y * places.sin()) * (layer(x) * later.cos() + y * later.sin())
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"offload": "host"}, {"offload": "host", "backend": "inductor"}], ids=str)
def test_what_all_moves_hold_firmly_every_shorter_length_holds(options: dict[str, str]) -> None:
    with mock.patch.object(Prefixes, "find_plan", autospec=True, side_effect=Prefixes.find_plan) as fitting:
        least_bytes(Tabled(), (torch.randn(16, 8),), tile="none", **options)
    orders = [call.args[0] for call in fitting.call_args_list]
    assert any(order.num_moves > 5 for order in orders)
    for order in orders:
        lengths = [order.try_length(length)[0] for length in range(order.num_moves + 1)]
        for number, held in enumerate(lengths):
            assert all(held.firm_bytes <= shorter.peak_bytes for shorter in lengths[: number + 1]), (order.name, number)
