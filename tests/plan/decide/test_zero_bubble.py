"""Weight gradients apart from the rest of backward: how long stages idle then, and where a plan has them so."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import zerofx
from gpt import GPT
from tests.lib.models import adamw
from tests.lib.runs.stages import UNet
from tests.plan.decide.test_stages import Skipping, planned
from zerofx import UsageError
from zerofx.driver.plan_only import PlannedStep
from zerofx.ir.micro_batches import turns
from zerofx.scheduler.cost.stages import StageSeconds, choose_lags, lags_up_to, simulate_stages

Counts = tuple[int, int, int]  # pieces that a stage has run: forward, input gradients, weight gradients


def _gpt(dim: int = 256) -> GPT:
    return GPT(vocab=512, dim=dim, depth=4, heads=4, block=64)


def _stages(num_stages: int = 4, **options: Any) -> tuple[PlannedStep, ...]:
    return planned(_gpt(), tuple(torch.randint(512, (2, 64, 64))), num_stages, accumulate=8, **options).stages


def _apart(num_stages: int, num: int) -> tuple[int | None, ...]:
    return lags_up_to(num_stages, num, [True] * num_stages)


@pytest.mark.parametrize(("num_stages", "num", "at_once", "apart"), [(4, 8, 9.0, 3.0), (8, 16, 21.0, 7.0)])
def test_equal_stages_idle_as_the_paper_says(num_stages: int, num: int, at_once: float, apart: float) -> None:
    forward, backward, weights = 1.0, 2.0, 1.0
    equal = [StageSeconds(forward, backward, weights=weights)] * num_stages
    gpipe, turns_alone = simulate_stages(equal, num), simulate_stages(equal, num, by_turns=True)
    zero_bubble = simulate_stages(equal, num, by_turns=True, lags=_apart(num_stages, num))
    assert gpipe.idle == turns_alone.idle == ((num_stages - 1) * (forward + backward),) * num_stages
    assert set(gpipe.idle) == {at_once}
    assert zero_bubble.idle == ((num_stages - 1) * (forward + backward - 2 * weights),) * num_stages
    assert set(zero_bubble.idle) == {apart}
    # All hold what weight gradients read of as many micro-batches as the first.
    assert set(zero_bubble.under_way) == {num_stages}
    assert choose_lags(equal, num, num_stages - 1, [True] * num_stages) == _apart(num_stages, num)


def torch_actions(name: str, num_stages: int, num: int, chunks: int = 1) -> list[list[tuple[int, int, str]]]:
    """What each rank of a schedule of torch's runs: stage, micro-batch, and F, I, W or B."""
    ranks = get_schedule_ops(name, num_stages, num, num_stages_per_rank=chunks)
    return [
        [
            (int(piece[1]), int(piece[3]), piece[2])
            for action in rank
            if (piece := re.fullmatch(r"(\d+)([FIWB])(\d+)", str(action))) is not None
        ]
        for rank in ranks
    ]


def replay(ranks: Sequence[Sequence[tuple[int, int, str]]], seconds: dict[str, float], num_stages: int) -> list[float]:
    """Seconds in which each rank idles: F, I and B wait for their neighbour, W for I."""
    done: dict[tuple[int, int, str], float] = {}
    free, places = [0.0] * len(ranks), [0] * len(ranks)
    while any(place < len(rank) for place, rank in zip(places, ranks, strict=True)):
        before = list(places)
        for number, rank in enumerate(ranks):
            while places[number] < len(rank):
                stage, batch, kind = rank[places[number]]
                back = kind in "IB"
                needs = [(stage - 1, batch, "F")] if kind == "F" else [(stage, batch, "F" if back else "I")]
                needs += [(stage + 1, batch, kind)] if back else []
                needs = [need for need in needs if need[0] in range(num_stages)]
                if any(need not in done for need in needs):
                    break
                ready = max((done[need] for need in needs), default=0.0)
                free[number] = done[stage, batch, kind] = max(free[number], ready) + seconds[kind]
                places[number] += 1
        assert places != before, "stands still"
    return [max(free) - sum(seconds[kind] for _, _, kind in rank) for rank in ranks]


@pytest.mark.parametrize(("num_stages", "num"), [(4, 8), (8, 16), (3, 5)])
def test_torch_s_schedules_idle_as_long(num_stages: int, num: int) -> None:
    equal = [StageSeconds(1.0, 2.0, weights=1.0)] * num_stages
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    gpipe = replay(torch_actions("GPipe", num_stages, num), seconds, num_stages)
    assert gpipe == list(simulate_stages(equal, num).idle)
    theirs = torch_actions("1F1B", num_stages, num)
    # The last rank's list counts forwards from 1 in torch 2.13.
    off = theirs[-1][0][1]
    theirs[-1] = [(stage, batch - off * (kind == "F"), kind) for stage, batch, kind in theirs[-1]]
    assert replay(theirs, seconds, num_stages) == list(simulate_stages(equal, num, by_turns=True).idle)


def test_torch_s_schedules_with_two_parts_a_rank_idle_half_as_long() -> None:
    for num_stages, num in ((4, 8), (8, 16)):
        halves = {"F": 0.5, "B": 1.0, "I": 0.5, "W": 0.5}
        zbv = replay(torch_actions("ZBVZeroBubble", num_stages, num, 2), halves, 2 * num_stages)
        equal = [StageSeconds(1.0, 2.0, weights=1.0)] * num_stages
        own = simulate_stages(equal, num, by_turns=True, lags=_apart(num_stages, num)).idle
        assert [2 * idle for idle in zbv] == list(own)


@pytest.mark.parametrize(("num_stages", "num"), [(2, 4), (4, 8), (8, 16), (3, 9)])
def test_the_order_is_that_of_torch_with_one_stage_a_rank(num_stages: int, num: int) -> None:
    """torch's schedule is of two stages a rank or more; the function behind it is of any number."""
    for rank, lag in enumerate(_apart(num_stages, num)):
        ahead = num_stages - 1 - rank
        theirs = schedules._get_1f1b_rank_ops(
            1, num_stages, ahead, num - ahead, ahead, rank, lambda _: 0, lambda _: 0,
            num_1f1b_microbatches=rank, enable_zero_bubble=True,
        )  # fmt: skip
        # The first stage's backward is not divided: weight gradients follow at once.
        own = itertools.chain.from_iterable(turns((0, ahead, ahead + (lag or 0)), num, weights_apart=True))
        pieces = [("FIW"[number], batch) for number, batch in own]
        assert pieces == [(str(action)[1], action.microbatch_index) for action in theirs if action]


def _next_states(state: tuple[Counts, ...], limits: Sequence[float], num: int) -> Iterator[tuple[Counts, ...]]:
    """States after each stage has run one piece of a second, or has waited."""
    choices: list[list[Counts]] = []
    for stage, (f, i, w) in enumerate(state):
        options = [(f, i, w)]
        if f < min(num, w + limits[stage]) and (stage == 0 or state[stage - 1][0] > f):
            options.append((f + 1, i, w))
        if i < f and (stage == len(state) - 1 or state[stage + 1][1] > i):
            options.append((f, i + 1, w))
        if w < i:
            options.append((f, i, w + 1))
        choices.append(options)
    return itertools.product(*choices)


def _is_behind(state: tuple[Counts, ...], other: tuple[Counts, ...]) -> bool:
    return state != other and all(
        a <= b for mine, its in zip(state, other, strict=True) for a, b in zip(mine, its, strict=True)
    )


def _least_seconds(num_stages: int, num: int, limits: Sequence[float]) -> int:
    """The fewest seconds of all orders of pieces of a second that hold no more micro-batches in a stage than its limit.

    What is behind another state in nothing but what it waited for cannot end before it, and is left out.
    """
    states, seconds = {((0, 0, 0),) * num_stages}, 0
    while ((num, num, num),) * num_stages not in states:
        coming = set(itertools.chain.from_iterable(_next_states(state, limits, num) for state in states))
        states = {state for state in coming if not any(_is_behind(state, other) for other in coming)}
        seconds += 1
    return seconds


@pytest.mark.parametrize(("num_stages", "num"), [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4)])
def test_no_order_within_the_same_bytes_is_shorter(num_stages: int, num: int) -> None:
    equal = [StageSeconds(1.0, 2.0, weights=1.0)] * num_stages
    own = simulate_stages(equal, num, by_turns=True, lags=_apart(num_stages, num))
    assert own.step == _least_seconds(num_stages, num, own.under_way)


def test_unequal_stages_wait_no_more_turns_than_it_takes() -> None:
    generator, num = random.Random(0), 8
    for _ in range(6):
        forward = [generator.uniform(0.5, 1.5) for _ in range(4)]
        stages = [StageSeconds(each, 2 * each, 0.0, 0.1, 0.1, weights=each) for each in forward]

        def seconds(*lags: int | None, stages: Sequence[StageSeconds] = stages) -> float:
            return simulate_stages(stages, num, by_turns=True, lags=lags).step

        lags = choose_lags(stages, num, 3, [True] * 4)
        least = min(seconds(None, *later) for later in itertools.product(range(5), repeat=3))
        assert seconds(*lags) <= 1.001 * least
        fewer = [(*lags[:n], (lags[n] or 0) - 1, *lags[n + 1 :]) for n in range(1, 4) if lags[n]]
        assert all(seconds(*each) > 1.001 * least for each in fewer)


def test_weight_gradients_come_later_where_that_is_faster() -> None:
    stages = _stages()
    assert [stage.plan.weights_lag for stage in stages] == [None, 1, 2, 3]
    (reason,) = {stage.plan.micro_batches_reason.partition("; ")[2] for stage in stages}
    assert "weight gradients up to 3 turns later" in reason and "; with weight gradients at once" in reason
    at_once = _stages(order="micro-batch")
    assert stages[0].plan.step_seconds < 0.9 * at_once[0].plan.step_seconds
    for mine, other in zip(stages, at_once, strict=True):
        predicted, alone = mine.plan.prediction, other.plan.prediction
        assert predicted is not None and alone is not None
        assert predicted.idle_seconds is not None and alone.idle_seconds is not None
        assert predicted.idle_seconds < alone.idle_seconds
        assert other.plan.weights_lag is None and other.plan.peak_bytes["device"] <= mine.plan.peak_bytes["device"]


class Uneven(nn.Sequential):
    """Layers of which the last holds most."""

    def __init__(self) -> None:
        last = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
        super().__init__(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)), last)


class Scaling(nn.Sequential):
    """Layers whose parameters' gradients come out of the operator that gives their inputs'."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.LayerNorm(64), nn.GELU()) for _ in range(4)))


def test_weight_gradients_come_with_backward_where_that_does_not_pay() -> None:
    # Messages take longer than anything here.
    stages = planned(UNet(), tuple(torch.randn(2, 8, 3, 8, 8)), 2, accumulate=4).stages
    assert {(stage.plan.weights_lag, stage.plan.by_layer) for stage in stages} == {(None, True)}
    rows = torch.ones(8 * 4096, 64)
    stages = planned(Scaling(), (rows, rows), 2, accumulate=8, loss_fn=nn.MSELoss()).stages
    assert {stage.plan.weights_lag for stage in stages} == {None}
    assert all("no weight gradients are computed apart" in stage.plan.micro_batches_reason for stage in stages)


def test_weight_gradients_come_as_late_as_the_budget_of_each_stage_has_room_for() -> None:
    def plan(**options: Any) -> tuple[list[int | None], int]:
        given = {"recompute": "none", "offload": "none", "loss_fn": nn.MSELoss(), "accumulate": 8, **options}
        stages = planned(Uneven(), (torch.ones(512, 32), torch.ones(512, 1)), 4, order="zero-bubble", **given).stages
        return [stage.plan.weights_lag for stage in stages], max(stage.plan.peak_bytes["device"] for stage in stages)

    lags, most = plan()
    assert lags == [None, 1, 2, 3]
    lags, least = plan(memory_budget=most - 1)
    assert lags == [None, 1, 2, 2] and least < most


def test_the_plan_says_when_weight_gradients_come(golden: Callable[..., None]) -> None:
    stage = planned(Skipping(), (torch.ones(8, 8),), 3, accumulate=8, order="zero-bubble").stages[2]
    golden(f"{stage.plan}\n\n{stage.lowered.emitted.source}")


def test_weight_gradients_apart_are_of_stages_alone() -> None:
    model = Skipping()
    with pytest.raises(UsageError, match="zero-bubble"):
        zerofx.plan(model, adamw(model), (torch.ones(8, 8),), order="zero-bubble", accumulate=2)
