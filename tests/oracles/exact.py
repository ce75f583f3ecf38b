"""Recomputation solved exactly, for small graphs: the referee of faster planners (see ``tests.oracles.problem``).

- ``solve`` is the integer program of Checkmate (Jain et al., 1910.02653, section 4), on HiGHS. Time goes in stages, and
  stage t ends with the first computation of node t (*frontier-advancing*); within a stage each node is computed at
  most once, in order. ``computed[t, i]`` says that stage t computes node i, ``resident[t, i]`` that i is there when
  stage t begins.
- ``search`` is the shortest path over sets of resident values: any node at any time, but for the order of first
  computations. Its states are sets, so it is for some 15 nodes; no schedule in that order beats it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.oracles.problem import Compute, Drop, Problem, Schedule, replay, with_drops
from zerofx.errors import UsageError

SEARCH_NODES = 20  # sets of more nodes than this are too many to search


@dataclass(frozen=True)
class Solution:
    """The best schedule that was found (None: there is none, or none was found in time), and what is proven.

    No schedule of the solver's kind takes less than ``least_seconds``, which is infinite where none fits the budget.
    """

    schedule: Schedule | None
    least_seconds: float


def solve(problem: Problem, budget: int, *, time_limit_seconds: float = 60.0) -> Solution:
    """The fastest frontier-advancing schedule within ``budget`` bytes.

    When time runs out: the best schedule so far, and the bound that is proven.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    program = _Program(problem, budget)
    cells = [(number, column, value) for number, row in enumerate(program.rows) for column, value in row.items()]
    numbers, columns, values = zip(*cells, strict=True)
    outcome = milp(
        program.costs,
        integrality=program.whole,
        bounds=Bounds(program.lower, program.upper),
        constraints=LinearConstraint(csr_array((values, (numbers, columns))), ub=program.limits),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )
    if outcome.status == _INFEASIBLE:
        return Solution(None, float("inf"))
    dual = outcome.mip_dual_bound
    least = program.second * dual if dual is not None and math.isfinite(dual) else 0.0
    if outcome.x is None:
        return Solution(None, least)
    schedule = with_drops(problem, program.order(outcome.x))
    # The solver keeps its constraints to a tolerance: a schedule is given out only if it keeps to the budget exactly.
    return Solution(schedule if replay(problem, schedule).peak_bytes <= budget else None, least)


_INFEASIBLE = 2  # scipy.optimize.milp's status

Column = tuple[str, int, int, int]  # kind, stage, node, and for a value that is freed the reader after which


class _Program:
    """The integer program: minimise ``costs`` of columns with ``rows`` at most ``limits``.

    What can only be 0 has no column, what can only be 1 is fixed. Bytes are counted in their greatest common divisor,
    seconds in the dearest node's, to be of the solver's scale. Columns: "computed" and "resident" as in the module;
    "freed": in this stage the value is not needed after that reader; "live": bytes while the node runs.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem = problem
        self._unit = math.gcd(*problem.num_bytes) or 1
        self._room = (budget - problem.base_bytes) // self._unit
        self.second = max(problem.seconds) or 1.0
        self._readers: list[list[int]] = [[] for _ in problem.reads]
        for node, sources in enumerate(problem.reads):
            for source in sources:
                self._readers[source].append(node)
        self._columns: dict[Column, int] = {}
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.limits: list[float] = []
        stages = range(problem.num_nodes)
        for stage in stages:
            self._add_columns(stage)
        for stage in stages:
            self._add_dependencies(stage)
            self._add_memory(stage)

    def order(self, values: Sequence[float]) -> list[int]:
        """The order of computations that a solution stands for."""
        chosen = [key for key, column in self._columns.items() if key[0] == "computed" and values[column] > 0.5]
        return [node for _, _, node, _ in sorted(chosen)]

    def _add_columns(self, stage: int) -> None:
        """What may be computed in a stage, and what resident when it begins: nodes that it or a later one needs."""
        problem = self._problem
        wanted = set(range(stage, problem.num_nodes))
        for node in reversed(range(problem.num_nodes)):
            if node in wanted:
                wanted.update(problem.reads[node])
        for node in range(stage + 1):
            cost = problem.seconds[node] / self.second
            if node == stage:
                self._column(("computed", stage, node, 0), cost=cost, lower=1.0)
            elif node in problem.results:
                self._column(("resident", stage, node, 0), lower=1.0)
            elif node in wanted:
                self._column(("resident", stage, node, 0))
                if node not in problem.once:
                    self._column(("computed", stage, node, 0), cost=cost)

    def _add_dependencies(self, stage: int) -> None:
        for node in range(stage + 1):
            computed, resident = ("computed", stage, node, 0), ("resident", stage, node, 0)
            if computed in self._columns:
                for source in self._problem.reads[node]:
                    # An input is computed in this stage or there when it begins.
                    self._row({computed: 1, ("computed", stage, source, 0): -1, ("resident", stage, source, 0): -1}, 0)
            self._row({computed: 1, resident: 1}, 1)
            # What is there in the next stage is there in this one, or computed in it.
            self._row({("resident", stage + 1, node, 0): 1, resident: -1, computed: -1}, 0)

    def _add_memory(self, stage: int) -> None:
        """Live bytes while each node of a stage runs: those before it, what is freed after that one, its own."""
        sizes = [size // self._unit for size in self._problem.num_bytes]
        before: dict[Column, float] = {("resident", stage, node, 0): sizes[node] for node in range(stage)}
        for node in range(stage + 1):
            computed = ("computed", stage, node, 0)
            if computed not in self._columns:
                continue
            live = ("live", stage, node, 0)
            self._column(live, upper=self._room, whole=0)
            self._row({**before, computed: sizes[node], live: -1}, 0)
            before = {live: 1.0}
            for value in {*self._problem.reads[node], node} - self._problem.results:
                freed = ("freed", stage, value, node)
                self._column(freed, whole=0)
                self._row({freed: 1, computed: -1}, 0)
                self._row({freed: 1, ("resident", stage + 1, value, 0): 1}, 1)
                for later in self._readers[value]:
                    if node < later <= stage:
                        self._row({freed: 1, ("computed", stage, later, 0): 1}, 1)
                before[freed] = -sizes[value]

    def _column(
        self, key: Column, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, whole: int = 1
    ) -> None:
        self._columns[key] = len(self._columns)
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)

    def _row(self, terms: Mapping[Column, float], limit: float) -> None:
        """A sum that is at most ``limit``; a column that there is not is 0."""
        row = {self._columns[key]: value for key, value in terms.items() if key in self._columns}
        if row:
            self.rows.append(row)
            self.limits.append(limit)


def search(problem: Problem, budget: int) -> Solution:
    """The least seconds of any schedule within ``budget`` bytes, by Dijkstra's algorithm over sets of resident values.

    A state is what is resident and how far the graph has been computed for the first time. Values are dropped only
    where the next computation needs the room, which loses nothing: a value can be dropped later as well.

    Raises:
        UsageError: there are more nodes than sets can be searched for.
    """
    if problem.num_nodes > SEARCH_NODES:
        raise UsageError(f"expected at most {SEARCH_NODES} nodes to search, found {problem.num_nodes}: use solve")
    room = budget - problem.base_bytes
    needs = [sum(1 << source for source in sources) for sources in problem.reads]
    keep = sum(1 << node for node in problem.results)
    queue: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    best: dict[tuple[int, int], float] = {(0, 0): 0.0}
    came: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    while queue:
        seconds, resident, done = heapq.heappop(queue)
        state = (resident, done)
        if seconds > best[state]:
            continue
        if done == problem.num_nodes:
            return Solution(_actions(problem, came, state), seconds)
        for node in range(done + 1):
            bit = 1 << node
            if resident & bit or needs[node] & ~resident or (node < done and node in problem.once):
                continue
            locked = needs[node] | (keep & resident)
            reached = seconds + problem.seconds[node]
            for rest in _fitting(problem, resident, locked, room - problem.num_bytes[node]):
                following = (rest | bit, max(done, node + 1))
                if reached < best.get(following, float("inf")):
                    best[following] = reached
                    came[following] = (state, node)
                    heapq.heappush(queue, (reached, *following))
    return Solution(None, float("inf"))


def _fitting(problem: Problem, resident: int, locked: int, room: int) -> Iterator[int]:
    """The largest subsets of ``resident`` with all of ``locked`` that take at most ``room`` bytes."""
    pending, seen = [resident], {resident}
    while pending:
        held = pending.pop()
        if sum(size for node, size in enumerate(problem.num_bytes) if held >> node & 1) <= room:
            yield held
            continue
        for node in range(problem.num_nodes):
            smaller = held & ~(1 << node)
            if smaller != held and not locked >> node & 1 and smaller not in seen:
                seen.add(smaller)
                pending.append(smaller)


def _actions(
    problem: Problem, came: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int]
) -> Schedule:
    steps: list[tuple[int, int, int]] = []
    while state in came:
        before, node = came[state]
        steps.append((before[0], node, state[0]))
        state = before
    actions: list[Compute | Drop] = []
    for held, node, behind in reversed(steps):
        actions += [Drop(i) for i in range(problem.num_nodes) if (held & ~behind) >> i & 1]
        actions.append(Compute(node))
    return tuple(actions)
