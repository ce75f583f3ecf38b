"""The bound on plans within a budget, held against every plan there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from gpt import GPT
from tests.lib.deciding import decided
from zerofx.capture.trace import Batch, capture
from zerofx.codegen.regions import Region, cut
from zerofx.driver.plan_only import plan
from zerofx.errors import MemoryBudgetError
from zerofx.ir.aliasing import storage_bytes, storage_source, tensors_of
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import Optimizers, UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.passes.prepare.simplify import simplify
from zerofx.pipeline import run_quietly
from zerofx.runtime.state.parameter_groups import group_of_parameters
from zerofx.scheduler.analysis.saved_values import saved_storages, value_node
from zerofx.scheduler.cost.liveness import apply_profiles, liveness
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.simulate import predict, simulate
from zerofx.scheduler.decide.activations import Segment, segments
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.bound import add_least_seconds, bound, convex_hull, least_seconds_to_free
from zerofx.scheduler.search.graph_facts import GraphFacts
from zerofx.scheduler.search.order import Move
from zerofx.settings import read_settings

MACHINE = Machine.named("cpu")
NAMES = ("linear", "tanh", "sin", "relu", "silu", "dropout", "double")
DIM, ROWS = 8, 24


class Layer(nn.Module):
    """A chain of the operators named, with a residual connection around it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for name in names if name == "linear")

    def forward(self, x: Tensor) -> Tensor:
        y, linears = x, iter(self.linears)
        for name in self.names:
            if name == "linear":
                y = next(linears)(y)
            elif name == "dropout":
                y = F.dropout(y, 0.5, training=True)
            elif name == "double":
                y = y + y
            elif name in ("relu", "silu"):
                y = getattr(F, name)(y)
            else:
                y = getattr(torch, name)(y)
        return x + y


class Chain(nn.Module):
    def __init__(self, names: tuple[str, ...], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(names) for _ in range(depth))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


@dataclass(frozen=True)
class Case:
    """A captured step with all that it takes to carry out a plan."""

    step: StepGraph
    layout: BucketLayout
    programs: dict[int, UpdateProgram]
    stage: int

    @staticmethod
    def of(
        model: nn.Module,
        batch: tuple[Tensor, ...],
        num_ranks: int = 1,
        stage: int = 3,
        num_micro_batches: int = 1,
    ) -> Case:
        step = capture(model, Batch.from_call(batch, {}), num_micro_batches=num_micro_batches)
        simplify(step)
        optimizers = Optimizers((torch.optim.AdamW(model.parameters(), foreach=False),))
        groups = group_of_parameters(model, optimizers, step.parameters, set(step.gradients))
        layout = layout_of(step, groups, Mesh(shard=num_ranks))
        programs = OptimizerBinding(optimizers, layout, step.device, prefer_fused=False).programs(None)
        return Case(step, layout, dict(programs), stage)

    def plan(self, dropped: list[str], extra: list[str], prefetch: int) -> Plan:
        """The plan that computes ``dropped`` again, with its prediction."""
        by_name = {node.name: node for node in self.step.graph.nodes}
        decisions = tuple(
            Absence(kind="recomputes", value=name, num_bytes=storage_bytes(tensors_of(by_name[name])[0]), reason="")
            for name in dropped
        )
        by_hand = replace(
            undecided(self.step, self.layout, self.stage, None, MACHINE.name),
            extra_keeps=tuple(extra),
            pieces=GraphFacts(self.step, MACHINE).pieces_without(set(dropped)),
        )
        made = decided(self.step, self.layout, by_hand.replace_absences(recomputes=decisions), prefetch)
        done = self.carry_out(made)
        prediction = predict(done, made, self.layout, simulate(done, MACHINE, self.layout.mesh, on_cpu=True))
        return made.with_prediction(prediction)

    def carry_out(self, made: Plan) -> StepGraph:
        done = self.step.clone()
        run_quietly(done, made, self.layout, self.programs, read_settings())
        return done

    def peak_outside_regions(self, made: Plan) -> int:
        """The peak when regions hold nothing but what they read and return: below that of any compiler."""
        done = self.carry_out(made)
        regions = [i for i in cut(done) if isinstance(i, Region)]
        return apply_profiles(liveness(done, on_cpu=False), done, [(region, ()) for region in regions]).peak_bytes

    def every_plan(self, prefetch: int = 1) -> Iterator[Plan]:
        """All choices of values to keep in all repeated layers; what a random operator gives is always kept."""
        crossing = saved_storages(self.step)
        for choice in itertools.product(*[list(self._choices(number)) for number in range(len(segments(self.step)))]):
            dropped, extra = [], []
            for part, kept in zip(segments(self.step), choice, strict=True):
                dropped += [value_node(part.values[i]).name for i in part.needed - part.fixed - kept]
                extra += [value_node(part.values[i]).name for i in sorted(kept) if part.values[i] not in crossing]
            yield self.plan(sorted(dropped), list(dict.fromkeys(extra)), prefetch)

    def _choices(self, number: int) -> Iterator[frozenset[int]]:
        part = segments(self.step)[number]
        free = [i for i in range(len(part.values)) if i not in part.fixed]
        random = {i for i in free if "bernoulli" in part.values[i][0].name}
        for size in range(len(free) + 1):
            for kept in itertools.combinations(free, size):
                if random & part.needed <= set(kept):
                    yield frozenset(kept) | (random - part.fixed)


def check_bounds(case: Case, peaks: dict[Plan, int], *, by_region: bool) -> None:
    """At every budget that is a peak, the bound is below the fastest plan that fits, whichever plan it is asked for."""
    for budget in sorted(set(peaks.values())):
        fitting = [made for made, peak in peaks.items() if peak <= budget]
        best = min(busy_seconds(made) for made in fitting)
        for made in (fitting[0], fitting[-1]):
            asked = replace(made, memory_budget=budget)
            found = add_least_seconds(
                asked, case.step, case.layout, MACHINE, on_cpu=not by_region, by_region=by_region
            ).prediction
            assert found is not None and found.least_seconds is not None
            assert found.least_seconds <= best * (1 + 1e-9)


def busy_seconds(made: Plan) -> float:
    """Seconds of computation: the planner may wait less than others do, as it may keep buckets gathered."""
    return made.step_seconds - made.exposed_seconds


class Ranks(TypedDict):
    world_size: int
    stage: int


def planned_seconds(model: nn.Module, batch: tuple[Tensor, ...], budget: int, **options: Unpack[Ranks]) -> float | None:
    """What the planner's own plan computes for, or None where it finds none that fits."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    try:
        found = plan(model, optimizer, batch, machine="cpu", memory_budget=budget, backend="eager", **options)
    except MemoryBudgetError:
        return None
    return busy_seconds(found.plan)


def check_against_every_plan(case: Case, model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """At every budget at which the answer can change: bound <= best plan <= plan of the planner."""
    prefetches = (1, 0) if case.layout.num_ranks > 1 else (1,)
    plans = [made for prefetch in prefetches for made in case.every_plan(prefetch)]
    check_bounds(case, {made: made.peak_bytes["device"] for made in plans}, by_region=False)
    check_bounds(case, {made: case.peak_outside_regions(made) for made in plans}, by_region=True)
    peaks = sorted({made.peak_bytes["device"] for made in plans})
    for budget in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        best = min(busy_seconds(made) for made in plans if made.peak_bytes["device"] <= budget)
        found = planned_seconds(model, batch, budget, world_size=case.layout.num_ranks, stage=case.stage)
        assert found is None or found >= best * (1 - 1e-9)


@pytest.mark.days(3)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).filter(lambda n: "linear" in n),
    depth=st.integers(1, 2),
)
def test_no_plan_is_faster_than_the_bound(names: list[str], depth: int) -> None:
    model, batch = Chain(tuple(names), depth), (torch.randn(ROWS, DIM),)
    check_against_every_plan(Case.of(model, batch), model, batch)


class Unlike(nn.Module):
    """Three layers that differ, in a model that is divided into pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 10), nn.Linear(10, 12), nn.Linear(12, 14)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = torch.tanh(torch.sin(layer(x)))
        loss: Tensor = x.square().mean()
        return loss


@pytest.mark.days(3)
def test_no_plan_of_a_model_without_repeated_layers_is_faster_than_the_bound() -> None:
    model, batch = Unlike(), (torch.randn(ROWS, DIM),)
    case = Case.of(model, batch)
    assert any(part.piece for part in segments(case.step))
    check_against_every_plan(case, model, batch)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_no_plan_of_a_sharded_step_is_faster_than_the_bound(stage: int) -> None:
    model, batch = Chain(("linear", "tanh"), 2), (torch.randn(ROWS, DIM),)
    check_against_every_plan(Case.of(model, batch, num_ranks=2, stage=stage), model, batch)


def test_no_plan_of_two_micro_batches_is_faster_than_the_bound() -> None:
    case = Case.of(Chain(("linear", "tanh"), 1), (torch.randn(ROWS, DIM),), num_micro_batches=2)
    check_bounds(case, {made: made.peak_bytes["device"] for made in case.every_plan()}, by_region=False)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        ids = torch.empty(4, 65, dtype=torch.long)
        return GPT(512, 64, 3, 4, 64), (ids[:, :-1], ids[:, 1:])


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("machine", "world_size", "shares"), [("cpu", 1, (0.8, 0.4)), ("h100-sxm", 4, (0.4,))])
def test_a_gpt_is_planned_near_the_bound(machine: str, world_size: int, shares: tuple[float, ...]) -> None:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def at(budget: int | None, recompute: Literal["auto", "full"] = "auto") -> Plan:
        return plan(
            model, optimizer, batch, machine=machine, world_size=world_size, memory_budget=budget, recompute=recompute,
            offload="none", backend="eager",
        ).plan  # fmt: skip

    least, most = at(None, "full").peak_bytes["device"], at(None).peak_bytes["device"]
    bounds = []
    for share in shares:
        made = at(least + int(share * (most - least)))
        assert made.prediction is not None and made.prediction.least_seconds is not None
        assert made.prediction.least_seconds <= busy_seconds(made) <= 1.05 * made.prediction.least_seconds
        bounds.append(made.prediction.least_seconds)
    assert bounds == sorted(bounds)


def test_a_budget_that_needs_no_recomputation_is_met_exactly() -> None:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    made = plan(model, optimizer, batch, machine="cpu", memory_budget="1GiB").plan
    assert made.prediction is not None and made.prediction.least_seconds == pytest.approx(made.step_seconds)
    assert "the plan takes at most 0.00% more" in str(made)
    assert Plan.from_json(made.to_json()).prediction == made.prediction


def test_a_budget_that_no_choice_meets_has_an_infinite_bound() -> None:
    model, batch = Chain(("linear", "tanh"), 2), (torch.randn(ROWS, DIM),)
    case = Case.of(model, batch)
    asked = replace(case.plan([], [], 1), memory_budget=1000)
    assert bound(asked, case.step, case.layout, MACHINE, on_cpu=True).extra_seconds_at_least == float("inf")


def test_a_plan_that_offloads_has_no_bound() -> None:
    model, batch = Chain(("linear", "tanh"), 2), (torch.randn(ROWS, DIM),)
    case = Case.of(model, batch)
    away = Absence(
        kind="offloads",
        value="tanh",
        tier="host",
        num_bytes=1,
        free_after=("tanh",),
        reload_before=("tanh",),
        reason="",
    )
    asked = replace(case.plan([], [], 1), memory_budget=10**9).replace_absences(offloads=[away])
    assert add_least_seconds(asked, case.step, case.layout, MACHINE, on_cpu=True) is asked


def test_the_hull_is_that_of_all_choices() -> None:
    """Each layer's corners, against all sets of kept values and the operators that must then run again."""
    step = Case.of(Chain(("linear", "tanh", "linear", "silu", "double", "sin"), 2), (torch.randn(ROWS, DIM),)).step
    for part in segments(step):
        sizes = [storage_bytes(tensors_of(value_node(storage))[0]) for storage in part.values]
        seconds = {node: node_cost(node, MACHINE).seconds for node in part.operators}
        points = []
        for kept in itertools.chain.from_iterable(
            itertools.combinations(range(len(part.values)), size) for size in range(len(part.values) + 1)
        ):
            again = _again(part, set(kept) | part.fixed)
            if again is not None:
                num_bytes = sum(sizes[i] for i in set(kept) | part.fixed)
                points.append((num_bytes, sum(seconds[node] for node in again)))
        hull = convex_hull(part, sizes, seconds)
        assert len(hull) > 2
        for level in hull:
            assert any(size == level.num_bytes and time == pytest.approx(level.seconds) for size, time in points)
        for level, following in itertools.pairwise(hull):
            price = (level.num_bytes - following.num_bytes) / (following.seconds - level.seconds)
            on_line = level.num_bytes + price * level.seconds
            assert all(size + price * time >= on_line * (1 - 1e-9) for size, time in points)
        assert hull[-1].num_bytes == min(size for size, _ in points)
        assert hull[0].seconds == 0.0


def _again(part: Segment, kept: set[int]) -> set[fx.Node] | None:
    """The operators that run again when ``kept`` are there; None if a value of another layer would be missing."""
    place = {storage: i for i, storage in enumerate(part.values)}
    made = set(part.operators)
    again: set[fx.Node] = set()
    missing = [part.values[i] for i in part.needed - kept]
    while missing:
        node, _ = missing.pop()
        if node not in made:
            return None
        if node not in again:
            again.add(node)
            sources = {storage_source(source) for source in node.all_input_nodes}
            missing += [storage for storage in sources if storage in place and place[storage] not in kept]
    return again


def test_bytes_are_freed_at_the_best_rates_first_and_in_part() -> None:
    moves = [Move(0, 1, 100, 10.0), Move(1, 1, 50, 1.0), Move(2, 1, 10, 4.0)]
    assert least_seconds_to_free(0, moves) == 0.0
    assert least_seconds_to_free(25, moves) == 0.5
    assert least_seconds_to_free(100, moves) == 6.0
    assert least_seconds_to_free(160, moves) == 15.0
    assert least_seconds_to_free(161, moves) == float("inf")
