"""The exact solvers against known optima and each other, and planners against the solvers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from tests.lib.chains import Stack
from tests.lib.graphs import Prepared, target
from tests.oracles.exact import SEARCH_NODES, search, solve
from tests.oracles.problem import (
    Compute,
    Drop,
    Problem,
    order_of,
    problem_of,
    replay,
    with_drops,
    without_recomputation,
)
from zerofx.capture.trace import Batch, capture
from zerofx.errors import UsageError
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Placeholder, Role, set_placeholder, set_value
from zerofx.ir.graph import StepGraph
from zerofx.options import check_options
from zerofx.passes.activations.recompute import recompute
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.simulate import predict, simulate
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.graph_facts import GraphFacts
from zerofx.scheduler.search.problem import Problem as PlanProblem
from zerofx.scheduler.search.question import Question
from zerofx.scheduler.search.rehearsal import Held, Rehearsal, peak_memory
from zerofx.scheduler.search.stage import Search, trail
from zerofx.scheduler.search.stages.moves import Moves, OutOfReachError

# A chain of n + 1 forward nodes and n backward ones, each of which also reads the forward node opposite, all of one
# size and one second: least computations with room for 3, 4, ... values, the one being computed included.
CHAINS = {
    2: (6, 5),
    3: (10, 8, 7),
    4: (15, 11, 10, 9),
    5: (21, 14, 13, 12, 11),
    6: (28, 18, 16, 15, 14, 13),
    7: (36, 22, 19, 18, 17, 16, 15),
}
CELLS = [(n, slots, least) for n, row in CHAINS.items() for slots, least in enumerate(row, start=3)]


def chain(n: int) -> Problem:
    reads = [(), *((i - 1,) if i <= n else tuple(sorted({i - 1, 2 * n - i})) for i in range(1, 2 * n + 1))]
    return Problem((1.0,) * len(reads), (1,) * len(reads), tuple(reads))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("n", "slots", "least"), CELLS)
def test_the_least_computations_of_a_chain(n: int, slots: int, least: int) -> None:
    """On a chain, one computation of a node between two first computations is enough: both solvers find the optimum."""
    for found in (search(chain(n), slots), solve(chain(n), slots)):
        assert found.schedule is not None
        assert found.least_seconds == pytest.approx(least)
        taken = replay(chain(n), found.schedule)
        assert taken.num_computed == least and taken.peak_bytes <= slots


@pytest.mark.parametrize("n", CHAINS)
def test_the_ends_of_a_chains_table(n: int) -> None:
    assert CHAINS[n][0] == (n + 1) * (n + 2) // 2
    assert CHAINS[n][-1] == 2 * n + 1 == replay(chain(n), without_recomputation(chain(n))).num_computed
    for solver in (search, solve):
        impossible = solver(chain(n), 2)
        assert impossible.schedule is None and impossible.least_seconds == float("inf")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small graphs in which every node but the last is read."""
    count = draw(st.integers(2, 8))
    reads = [draw(st.sets(st.integers(0, max(0, node - 1)), max_size=3)) if node else set() for node in range(count)]
    for node in range(count - 1):
        if not any(node in sources for sources in reads[node + 1 :]):
            reads[draw(st.integers(node + 1, count - 1))].add(node)
    nodes = st.sets(st.integers(0, count - 1), max_size=2)
    return Problem(
        seconds=tuple(float(draw(st.integers(1, 9))) for _ in range(count)),
        num_bytes=tuple(draw(st.integers(1, 5)) for _ in range(count)),
        reads=tuple(tuple(sorted(sources)) for sources in reads),
        results=frozenset(draw(nodes)) | {count - 1},
        once=frozenset(draw(nodes)),
        base_bytes=draw(st.integers(0, 3)),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=problems(), share=st.floats(0, 1))
def test_a_schedule_keeps_its_budget_and_costs_what_the_solver_says(problem: Problem, share: float) -> None:
    keeping = replay(problem, without_recomputation(problem))
    assert keeping.seconds == sum(problem.seconds)
    needed = max(problem.num_bytes[n] + sum(problem.num_bytes[i] for i in r) for n, r in enumerate(problem.reads))
    low = problem.base_bytes + needed
    budget = low + int(share * (keeping.peak_bytes - low))
    free, staged = search(problem, budget), solve(problem, budget)
    for found in (free, staged):
        if found.schedule is None:
            assert found.least_seconds == float("inf")
            continue
        taken = replay(problem, found.schedule)
        assert taken.peak_bytes <= budget
        assert taken.seconds == pytest.approx(found.least_seconds)
        assert taken.seconds >= keeping.seconds
    assert free.least_seconds <= staged.least_seconds * (1 + 1e-9)
    if budget == keeping.peak_bytes:
        assert staged.least_seconds == pytest.approx(keeping.seconds)


def test_out_of_time_the_bound_still_holds() -> None:
    stopped = solve(chain(7), 5, time_limit_seconds=1e-3)
    assert stopped.least_seconds <= 19 * (1 + 1e-9)


def test_what_is_read_again_is_not_dropped_in_between() -> None:
    problem = Problem((1.0,) * 4, (1,) * 4, ((), (0,), (1,), (0, 2)))
    assert with_drops(problem, [0, 1, 2, 0, 3]) == (
        Compute(0), Compute(1), Drop(0), Compute(2), Drop(1), Compute(0), Compute(3), Drop(0), Drop(2), Drop(3),
    )  # fmt: skip


TWO = Problem((1.0, 1.0), (1, 1), ((), (0,)), results=frozenset({1}), once=frozenset({0}))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((Compute(1),), r"inputs of 1 to be resident, found \[0\] missing"),
        ((Compute(0), Drop(0), Drop(0)), "expected 0 to be resident, found it dropped"),
        ((Compute(0), Compute(0)), "expected 0 to be computed once"),
        ((Compute(0), Compute(1), Drop(1)), r"results resident at the end, found \[1\] missing"),
        ((Compute(0),), "found"),
    ],
)
def test_what_is_no_schedule_is_refused(actions: tuple[Compute | Drop, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(TWO, actions)


def test_a_problem_that_is_out_of_order_is_refused() -> None:
    with pytest.raises(UsageError, match="node 0 to read earlier nodes"):
        Problem((1.0, 1.0), (1, 1), ((1,), ()))
    with pytest.raises(UsageError, match="of the same nodes"):
        Problem((1.0,), (1, 1), ((), ()))


def test_too_many_nodes_to_search_are_refused() -> None:
    with pytest.raises(UsageError, match=f"at most {SEARCH_NODES} nodes"):
        search(chain(SEARCH_NODES), 5)


SLOT = 64  # bytes of each value of a chain's step graph


def a_second_each() -> Machine:
    """A machine on which every operator takes a second: nothing but the launch costs anything."""
    h100 = Machine.named("h100-sxm")
    device = dataclasses.replace(h100.device, launch_latency=1.0, memory_bandwidth=1e30)
    peak = dataclasses.replace(device.peak, float32=1e30)
    return dataclasses.replace(h100, device=dataclasses.replace(device, peak=peak))


def chain_step(n: int, per_layer: int) -> StepGraph:
    """The chain of ``n`` as a step graph; ``per_layer`` forward nodes make a repeated layer, the last is in none."""
    graph = fx.Graph()
    x = set_placeholder(set_value(graph.placeholder("x"), torch.empty(SLOT // 4)), Placeholder(Role.INPUT, "x"))
    forward = [x]
    for i in range(n + 1):
        where = Origin(f"layers.{i // per_layer}" if i < n else "", Phase.FORWARD)
        forward.append(insert_call(graph, torch.ops.aten.neg.default, (forward[-1],), where))
    gradient = forward[-1]
    for i in range(n):
        where = Origin("", Phase.BACKWARD)
        gradient = insert_call(graph, torch.ops.aten.mul.Tensor, (gradient, forward[n - i]), where)
    graph.output((gradient,))
    return StepGraph(graph, torch.device("cpu"), (), frozenset(f"layers.{i}" for i in range(n)))


def recomputed(step: StepGraph, plan: Plan) -> StepGraph:
    copy = step.clone()
    recompute(copy, frozenset(d.value for d in plan.recomputes), frozenset(plan.extra_keeps))
    return copy


def fitted(step: StepGraph, machine: Machine, budget: int) -> Plan | None:
    """The planner's plan for a step without parameters' passes, or None where it finds none."""
    layout = BucketLayout((), Mesh())
    blank = dataclasses.replace(undecided(step, layout, 0, None, machine.name), memory_budget=budget)
    question = Question(GraphFacts(step, machine), layout, blank, recompute=True)
    rehearsal = WithoutParameters(step, layout, {}, target(machine))
    work = Prepared(step, layout, {}, decide(step, layout, blank, PolicyOptions()))
    problem = PlanProblem(work, rehearsal, check_options(stage=0), budget, machine, questions=question.divisions)
    with trail(verbose=False, debug=0) as silent:
        try:
            return Search((Moves(), Predicted()), silent).plan(problem)
        except OutOfReachError:
            return None


class WithoutParameters(Rehearsal):
    """Carries out recomputation alone, and simulates a step of one rank on a device that is no CPU."""

    def peak_memory(self, plan: Plan, begun: StepGraph, done: Collection[str]) -> Held:
        return peak_memory(begun, liveness(begun, on_cpu=False))

    def predict(self, plan: Plan) -> Prediction:
        copy = recomputed(self.captured, plan)
        return predict(copy, plan, self.layout, simulate(copy, self.target.machine, Mesh(), on_cpu=False))


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Leaves a plan that fits as it is."""

    name: str = "predicted"

    def plan(self, problem: PlanProblem, rest: Search) -> Plan:
        assert problem.plan is not None
        return problem.plan.with_prediction(problem.rehearsal.predict(problem.plan))


def check_replay(step: StepGraph, machine: Machine, plan: Plan, budget: int) -> float:
    """Peak and seconds of a plan, as predicted and as replayed; returns the seconds."""
    problem, copy = problem_of(step, machine), recomputed(step, plan)
    taken = replay(problem, with_drops(problem, order_of(step, copy)))
    assert taken.peak_bytes == liveness(copy, on_cpu=False).peak_bytes <= budget
    assert taken.seconds == pytest.approx(plan.step_seconds)
    return taken.seconds


@pytest.mark.parametrize("per_layer", [2, 3, 4])
def test_the_planner_is_at_or_above_the_optimum_of_a_chain(per_layer: int) -> None:
    n, machine = 7, a_second_each()
    step = chain_step(n, per_layer)
    seconds = []
    for slots, least in enumerate(CHAINS[n], start=3):
        budget = SLOT * (1 + slots)
        plan = fitted(step, machine, budget)
        if plan is not None:
            taken = check_replay(step, machine, plan, budget)
            assert taken >= least * (1 - 1e-9)
            seconds.append(taken)
    assert len(seconds) >= 2
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert seconds[-1] == pytest.approx(2 * n + 1)


class Layer(nn.Module):
    """A linear layer and two functions, with a residual connection around them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_plans_of_a_captured_step_are_at_or_above_the_optimum(depth: int) -> None:
    """Checkmate may compute anything again at any time, the planner only what its menus offer."""
    model, machine = Stack(*(Layer() for _ in range(depth))), Machine.named("cpu")
    step = capture(model, Batch.from_call((torch.randn(64, 8),), {}))
    simplify(step)
    problem = problem_of(step, machine)
    keeping = replay(problem, without_recomputation(problem))
    assert keeping.peak_bytes == liveness(step, on_cpu=False).peak_bytes
    num_plans = 0
    for less in range(depth + 1):
        budget = keeping.peak_bytes - less * max(problem.num_bytes)
        best, plan = solve(problem, budget, time_limit_seconds=20), fitted(step, machine, budget)
        if best.schedule is not None:
            assert replay(problem, best.schedule).peak_bytes <= budget
        if plan is not None:
            taken = check_replay(step, machine, plan, budget)
            assert keeping.seconds <= best.least_seconds * (1 + 1e-9) <= taken * (1 + 2e-9)
            num_plans += 1
    assert num_plans >= depth
