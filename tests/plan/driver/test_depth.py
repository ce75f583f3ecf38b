"""Identical layers are planned and compiled once: a deeper model has no more distinct regions, and takes no longer for
each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from gpt import GPT
from tests.lib.graphs import prepare
from tests.lib.lowered import Deep, lowered
from tests.lib.models import adamw
from tests.lib.runs.sharing import SHARING
from zerofx.codegen.regions import regions_of
from zerofx.driver.plan_only import plan
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.categories import peak_moment
from zerofx.scheduler.plan.decisions import Absence

VOCAB = 11


@dataclass(frozen=True)
class _Regions:
    distinct: int
    all: int


def _regions(depth: int, stage: int, world_size: int) -> _Regions:
    with torch.device("meta"):
        model = GPT(vocab=VOCAB, dim=8, depth=depth, heads=2, block=4)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    planned = plan(model, adamw(model), (ids, ids), stage, world_size=world_size)
    return _Regions(planned.num_distinct_regions, len(regions_of(planned.lowered.instructions)))


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [(0, 1), (3, 2), *(pytest.param(s, w, marks=pytest.mark.slow) for s, w in ((0, 2), (1, 2), (2, 2), (3, 64)))],
)
def test_distinct_regions_do_not_grow_with_depth(stage: int, world_size: int) -> None:
    shallow, deep = _regions(4, stage, world_size), _regions(12, stage, world_size)
    assert deep.distinct == shallow.distinct
    assert deep.all > 2 * shallow.all


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "mesh", [{"model": 2}, pytest.param({"shard": 2, "model": 2}, marks=pytest.mark.slow)], ids=str
)
def test_nor_where_ranks_share_layers(mesh: dict[str, int]) -> None:
    num_distinct, num_shardings = set[int](), list[int]()
    for depth in (2, 6):
        with torch.device("meta"):
            model, ids = GPT(vocab=64, dim=64, depth=depth, heads=4, block=128), torch.zeros(1, 128, dtype=torch.long)
        planned = plan(model, adamw(model), (ids, ids), mesh=mesh, machine=SHARING, backend="inductor")
        num_distinct.add(planned.num_distinct_regions)
        num_shardings.append(len(planned.plan.shardings))
    assert len(num_distinct) == 1
    assert num_shardings[1] > 2 * num_shardings[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_24_layers_have_the_distinct_regions_of_4(stage: int) -> None:
    assert _regions(24, stage, 2).distinct == _regions(4, stage, 2).distinct


def test_the_graph_is_not_gone_through_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes as long as the graph is deep is done as often in a deep one as in a shallow one, tiers or none."""
    counted = dict.fromkeys(("nodes_by_name", "placeholders", "positions"), 0)
    for name in counted:
        monkeypatch.setattr(StepGraph, name, _counting(name, counted))
    numbers = []
    for depth in (4, 12):
        prepared = prepare(Deep(depth), stage=3, num_ranks=2)
        indices = [decision.bucket for decision in prepared.plan.reduces]
        states = tuple(
            Absence(kind="states", bucket=index, tier="nvme", update="host", reason="by hand") for index in indices
        )
        prepared.plan = prepared.plan.replace_absences(states=states)
        counted.update(dict.fromkeys(counted, 0))
        prepared.run_pipeline()
        numbers.append(dict(counted))
    assert numbers[0] == numbers[1]


def test_the_peak_is_looked_for_once() -> None:
    step = lowered(12, stage=0, num_ranks=1)
    live = step.simulation.live
    during = _Looked(live.during)
    moment = peak_moment(step.graph, replace(live, during=during))
    assert moment == peak_moment(step.graph, live)
    assert during.num_looks <= 2 * len(during)  # once for the peak, once for what is held at each call


def test_the_last_placeholder_is_the_last_in_order_whatever_was_made_last() -> None:
    step = prepare(Deep(2)).step
    assert step.last_placeholder() is list(step.placeholders())[-1]
    first = next(iter(step.placeholders()))
    with step.graph.inserting_after(first):
        step.graph.placeholder("early")
    assert step.last_placeholder() is list(step.graph.find_nodes(op="placeholder"))[-1]
    assert step.last_placeholder().name != "early"


class _Looked(dict[fx.Node, int]):
    """Counts how often values are looked at."""

    num_looks = 0

    def __getitem__(self, node: fx.Node) -> int:
        self.num_looks += 1
        return super().__getitem__(node)


def _counting(name: str, counted: dict[str, int]) -> Callable[..., Any]:
    original = getattr(StepGraph, name)

    def counting(*args: Any) -> Any:
        counted[name] += 1
        return original(*args)

    return counting
