"""Stages that take all micro-batches through a chunk before the next: where they are cut, wait, and are chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from gpt import GPT
from tests.lib.models import adamw
from tests.plan.decide.test_stages import planned
from zerofx import UsageError
from zerofx.driver.plan_only import PlannedStep
from zerofx.ir import ops
from zerofx.scheduler.cost.stages import StageSeconds, simulate_stages
from zerofx.scheduler.search.stage_cuts import _divide_round


def _plan(**options: Any) -> PlannedStep:
    model = GPT(vocab=19, dim=64, depth=4, heads=2, block=16)
    batch = tuple(torch.randint(19, (2, 16, 16)))
    return planned(model, batch, 2, accumulate=8, **options)


@pytest.mark.parametrize(("num_stages", "num", "num_chunks"), [(2, 4, 2), (4, 8, 2), (4, 9, 5), (8, 16, 10)])
def test_each_stage_idles_for_one_chunk_of_each_other(num_stages: int, num: int, num_chunks: int) -> None:
    chunks = [StageSeconds(1.0, 2.0)] * (num_chunks * num_stages)
    own = simulate_stages(chunks, num, num_stages=num_stages)
    assert own.idle == (3.0 * (num_stages - 1),) * num_stages
    assert own.under_way[0] == num


def test_fewer_micro_batches_than_stages_wait_in_each_round() -> None:
    own = simulate_stages([StageSeconds(1.0, 2.0)] * 8, 2, num_stages=4)
    # Two turns more before the second round's forward, and two before its backward is over.
    assert own.idle == (3.0 * 3 + 2 * 1.0 + 2 * 2.0,) * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_round_is_divided_so_that_its_slowest_chunk_takes_least(seed: int) -> None:
    generator = random.Random(seed)
    seconds = [generator.choice((0.1, 1.0, 1.0, 1.0, 2.4)) for _ in range(9)]

    def cost(begin: int, end: int) -> float:
        return sum(seconds[begin:end])

    def slowest(begin: int, cuts: Sequence[int], end: int) -> float:
        return max(itertools.starmap(cost, itertools.pairwise((begin, *cuts, end))))

    for begin, num_parts in itertools.product(range(4), (1, 2, 3, 4)):
        found = _divide_round(cost, begin, len(seconds), num_parts)
        assert set(found) == set(range(begin + num_parts, len(seconds) + 1))
        for end, (least, cuts) in found.items():
            ways = itertools.combinations(range(begin + 1, end), num_parts - 1)
            assert slowest(begin, cuts, end) == least == min(slowest(begin, way, end) for way in ways)


def test_a_stage_has_chunks_of_as_many_layers_as_are_fastest() -> None:
    rows = torch.ones(2048, 64)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    stages = planned(layers, (rows, rows), 2, accumulate=8, order="round-robin", loss_fn=nn.MSELoss()).stages
    assert {stage.plan.num_chunks for stage in stages} == {4} and all(stage.plan.by_layer for stage in stages)
    assert [len(stage.layout.buckets) for stage in stages] == [4, 4]


def _linear(**options: Any) -> PlannedStep:
    layers, rows = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), torch.ones(16, 8)
    return planned(layers, (rows, rows), 2, accumulate=8, order="round-robin", loss_fn=nn.MSELoss(), **options).stages[
        0
    ]


def test_what_is_sent_is_held_until_the_next_chunk_of_the_stage_has_what_follows() -> None:
    calls = [node for node in _linear().lowered.graph.calls() if not node.name.startswith("micro")]
    messages = [node.name.partition("_")[0] for node in calls if node.target in (*ops.MESSAGES, ops.wait)]
    forward = [["send"], ["receive", "received", "sent", "send"]]
    # Backward of the last chunk here begins with the loss and with a gradient, of the first one with a gradient.
    backward = [["receive", "received", "sent", "receive", "received", "send"], ["receive", "received", "sent"]]
    assert messages == list(itertools.chain(*forward, *backward))


@pytest.mark.slow
def test_parameters_on_the_host_are_dealt_round_robin_where_that_is_faster() -> None:
    budget = 950_000
    options: dict[str, Any] = {"memory_budget": budget, "offload": "host"}
    best, turns = _plan(**options), _plan(order="micro-batch", **options)
    assert {stage.plan.num_chunks for stage in best.stages} == {2} and best.plan.by_layer
    assert best.plan.step_seconds < 0.9 * turns.plan.step_seconds
    assert all("rather than one forward, one backward" in stage.plan.micro_batches_reason for stage in best.stages)
    for mine, others in zip(best.stages, turns.stages, strict=True):
        assert mine.plan.peak_bytes["device"] <= budget
        up = [stage.lowered.simulation.link_bytes["to_device"] for stage in (mine, others)]
        assert 4 * up[0] < up[1]
        assert up[0] <= 2 * sum(4 * bucket.num_parameters for bucket in mine.plan.buckets)


def test_a_plan_says_what_its_rounds_are(golden: Callable[..., None]) -> None:
    stage = _linear()
    source = stage.lowered.emitted.source
    golden(f"{stage.plan}\n\n{source[source.index('def step(') :]}")


def test_too_few_parts_and_one_process_are_refused() -> None:
    model, rows = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.ones(8, 8)
    with pytest.raises(UsageError, match="at least 4 parts of a step"):
        planned(model, (rows, rows), 2, order="round-robin", loss_fn=nn.MSELoss())
    with pytest.raises(UsageError, match="round-robin"):
        zerofx.plan(model, adamw(model), (rows, rows), order="round-robin", accumulate=2, loss_fn=nn.MSELoss())
