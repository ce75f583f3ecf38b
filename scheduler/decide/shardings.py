"""Sharding of the computation on the model axis: an integer program over the distinct layers, solved by HiGHS.

A binary for each rule of each class of nodes (``scheduler/analysis/layer_classes.py``: layers that are alike are
decided alike, so that the program does not grow with depth) says which is taken. Numbers between 0 and 1 say how much
of a value flows to each of its readers from how it is given to how their rules ask for it, what is converted once for
all of them, and in which placement it waits for backward, where it may be converted again:

    minimise        seconds of all calls and conversions, and ``seconds_per_byte`` for what waits for backward, and for
                    what is made whole
    each call       has one rule
    each reader     sum over q of flow[p, q] = given[p];    sum over p of flow[p, q] = asked[q]
    conversions     flow[p, q] <= converted[p, q]
    what waits      is a reader of what forward gives, and gives to readers in backward

Once rules are 0 or 1 nearly all flows are too, so that there is little to branch on. It is exact for
these costs: seconds add up. What overlaps is not seen here: a plan's simulation tells.

Not handled: values that share memory are paid for one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor, fx

from zerofx.errors import PlanError
from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import Phase, Role, origin, placeholder, tensor
from zerofx.ir.sharding.rule import Rule, num_bytes, read_tensors, results_of
from zerofx.ir.sharding.rules import replication_rule
from zerofx.ir.text import target_name
from zerofx.scheduler.analysis.sharding_ways import Result, ShardingWays
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.sharding_seconds import Prices, conversion_seconds, seconds_of_share
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Partial, Placement, local_shape
from zerofx.units import format_seconds

_PREFERENCE = 1e-12  # seconds: of ways that cost the same, one without conversions


def decide_shardings(
    ways: ShardingWays,
    mesh: Mesh,
    machine: Machine,
    prices: Prices,
    pinned: Mapping[str, Placement] = MappingProxyType({}),
    *,
    explained: bool = True,
) -> tuple[ShardingDecision, ...]:
    """The cheapest way to share a captured graph: one decision for each node that not every rank does whole, or of
    which nothing can be shared.

    ``pinned`` are the placements of parameters that are given, by name. ``explained``: whether decisions say what the
    next best would cost, for which a program without whole numbers is solved for each class of parameters.

    Raises:
        PlanError: the solver gave up, or a parameter cannot lie as is given.
    """
    program = _Program()
    nodes = _Nodes(ways, mesh, machine, prices, program, pinned)
    nodes.add_all()
    answer = program.solve()
    return tuple(nodes.decisions(answer, explained=explained))


@dataclass
class _Program:
    """Minimise ``cost . x`` for ``0 <= x <= 1``, some of them whole, with rows of ``low <= a . x <= high``."""

    costs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def variable(self, cost: float, *, whole: bool = False) -> int:
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def equal(self, left: Iterable[int], right: Iterable[int]) -> None:
        """The sum of ``left`` is that of ``right``."""
        row = dict.fromkeys(left, 1.0)
        for name in right:
            row[name] = row.get(name, 0.0) - 1.0
        self.rows.append((row, 0.0, 0.0))

    def solve(self, without: int | None = None) -> _Answer:
        """The least cost, and who pays it; ``without``: where this variable is 0, and none has to be whole, which costs
        no more than the best whole one.

        Raises:
            PlanError: there is none.
        """
        import numpy as np  # scipy takes a second to import: only who shards computation pays
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        entries = [
            (number, name, factor) for number, (row, _, _) in enumerate(self.rows) for name, factor in row.items()
        ]
        places, names, factors = zip(*entries, strict=True)
        matrix = csr_matrix((factors, (places, names)), shape=(len(self.rows), len(self.costs)))
        scale = max(self.costs) or 1.0
        answer = milp(
            np.array(self.costs) / scale,
            integrality=np.array(self.whole, dtype=int) if without is None else np.zeros(len(self.whole), dtype=int),
            bounds=Bounds(0, [0.0 if name == without else 1.0 for name in range(len(self.costs))]),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]),
            options={"mip_rel_gap": 1e-4, "time_limit": 120.0},
        )
        if answer.x is None:
            raise PlanError(f"no way to share the computation was found: {answer.message}")
        return _Answer(float(answer.fun) * scale, [float(number) for number in answer.x])


@dataclass(frozen=True)
class _Answer:
    """Seconds that a program comes to, and its variables."""

    seconds: float
    values: list[float]

    def __getitem__(self, name: int) -> bool:
        return self.values[name] > 0.5


class _Nodes:
    """The classes of nodes, in the program."""

    def __init__(
        self,
        ways: ShardingWays,
        mesh: Mesh,
        machine: Machine,
        prices: Prices,
        program: _Program,
        pinned: Mapping[str, Placement],
    ) -> None:
        self._ways, self._mesh, self._machine, self._prices, self._program = ways, mesh, machine, prices, program
        self._num_ranks, self._pinned = ways.num_ranks, pinned
        self._taken: dict[fx.Node, list[tuple[int, Rule]]] = {}
        self._given: dict[Result, dict[Placement, list[int]]] = {}
        self._again: dict[Result, dict[Placement, list[int]]] = {}

    def add_all(self) -> None:
        for node, possible in self._ways.placeholders.items():
            placements = self._apply_pins(node, possible)
            rules = [Rule((placement,), ()) for placement in placements]
            self._add(node, rules, [self._seconds(node, rule) for rule in rules])
        for node, rules in self._ways.rules.items():
            self._add(node, rules, [self._seconds(node, rule) for rule in rules])
        for slot, readers in self._readers().items():
            self._convert(slot, readers)

    def _seconds(self, node: fx.Node, rule: Rule) -> float:
        return seconds_of_share(node, rule, self._mesh, self._machine, self._prices)

    def _conversion_seconds(self, tensor: Tensor, source: Placement, target: Placement) -> float:
        seconds = conversion_seconds(tensor, source, target, self._mesh, self._machine) + _PREFERENCE
        if target == REPLICATED != source:
            seconds += self._prices.seconds_per_byte * num_bytes(tuple(tensor.shape), tensor.dtype)
        return seconds

    def _apply_pins(self, node: fx.Node, possible: list[Placement]) -> list[Placement]:
        pinned = {self._pinned.get(placeholder(member).name) for member in self._ways.classes.members[node]} - {None}
        if not pinned:
            return possible
        allowed = [placement for placement in possible if placement in pinned]
        if len(allowed) != 1 or len(pinned) != 1:
            raise PlanError(
                f"expected {placeholder(node).name} to lie in one of {', '.join(map(str, possible))} on "
                f"{self._num_ranks} ranks of the model axis, found {', '.join(sorted(map(str, pinned)))} asked for"
            )
        return allowed

    def decisions(self, answer: _Answer, *, explained: bool) -> Iterator[ShardingDecision]:
        """Decisions of an answer, for classes of nodes that not every rank computes whole, or that have no choice."""
        for node, taken in self._taken.items():
            name, rule = next((name, rule) for name, rule in taken if answer[name])
            again = self._placements_in_backward(node, answer)
            whole = all(placement in (None, REPLICATED) for placement in (*rule.outputs, *rule.inputs))
            could_be = self._ways.placeholders.get(node, taken)  # of one that is given: this too
            has_no_way = len(could_be) == 1 and whole and self._has_work(node)
            if whole and not again and not has_no_way:
                continue
            reason = self._reason(node, name, answer) if explained else ""
            for member in self._ways.classes.members[node]:

                def text(placement: Placement, member: fx.Node = member) -> str:
                    return str(self._ways.member_placement(member, placement))

                outputs = tuple(None if placement is None else text(placement) for placement in rule.outputs)
                inputs, made_again = tuple(map(text, rule.inputs)), tuple(map(text, again))
                parameter = placeholder(member).name if member.op == "placeholder" else ""
                yield ShardingDecision(member.name, outputs, inputs, made_again, parameter, has_no_way, reason)

    def _has_work(self, node: fx.Node) -> bool:
        """True if a call takes time of its own, or a placeholder is a parameter's matrix."""
        if node.op == "placeholder":
            return placeholder(node).role is Role.PARAMETER and tensor(node).ndim > 1
        return not is_view(node) and node_cost(node, self._machine).bytes_read > 0

    def _reason(self, node: fx.Node, name: int, answer: _Answer) -> str:
        """The choice next to its alternatives: seconds are those of a step, of all layers that are alike."""
        taken, times = self._taken[node], len(self._ways.classes.members[node])
        if node.op == "placeholder":
            shape = list(tensor(node).shape)
            if len(taken) == 1:
                spent = format_seconds(times * self._seconds(node, taken[0][1]))
                return f"{self._num_ranks} ranks share no dimension of {shape} that its readers can: {spent} to gather"
            other = self._program.solve(without=name)
            second = max((entry for entry in taken if entry[0] != name), key=lambda entry: other.values[entry[0]])
            more = max(other.seconds - answer.seconds, 0.0)
            return f"as {second[1].outputs[0]}, the next best, a step takes {format_seconds(more)} more, or longer"
        by_all, rule = replication_rule(node), dict(taken)[name]
        whole, own = (times * self._seconds(node, each) for each in (by_all, rule))
        if len(taken) == 1 and rule == by_all:
            return f"{target_name(node)} cannot be shared: every rank does it whole, {format_seconds(whole)} a step"
        sent = ", with what it sends to the ranks of rows and back" if rule.extra.exchanged_bytes else ""
        return f"{format_seconds(own)} a step on each rank{sent}, {format_seconds(whole)} where each does it whole"

    def _placements_in_backward(self, node: fx.Node, chosen: _Answer) -> tuple[Placement, ...]:
        repeated = self._again.get((node, 0), {})
        return tuple(placement for placement, names in repeated.items() if any(chosen[name] for name in names))

    def _add(self, node: fx.Node, rules: list[Rule], seconds: list[float]) -> None:
        times = len(self._ways.classes.members[node])
        names = [self._program.variable(times * cost, whole=True) for cost in seconds]
        self._program.rows.append((dict.fromkeys(names, 1.0), 1.0, 1.0))
        self._taken[node] = list(zip(names, rules, strict=True))
        for name, rule in self._taken[node]:
            for index, placement in enumerate(rule.outputs):
                if placement is not None:
                    self._given.setdefault((node, index), {}).setdefault(placement, []).append(name)

    def _readers(self) -> dict[Result, list[tuple[Phase, dict[Placement, list[int]]]]]:
        """For each value, who reads it: in which phase, and for each placement the variables that ask for it."""
        readers: dict[Result, dict[Result, tuple[Phase, dict[Placement, list[int]]]]] = {}
        for node, taken in self._taken.items():
            for member in self._ways.classes.members[node]:
                for number, source in enumerate(read_tensors(member)):
                    asked: dict[Placement, list[int]] = {}
                    for name, rule in taken:
                        asked.setdefault(rule.inputs[number], []).append(name)
                    readers.setdefault(self._ways.slot(source), {})[node, number] = (origin(node).phase, asked)
        for asker, node, asked in self._results():
            readers.setdefault(self._ways.slot(node), {})[asker, len(readers)] = (Phase.BACKWARD, asked)
        return {slot: list(of_slot.values()) for slot, of_slot in readers.items()}

    def _results(self) -> Iterator[tuple[fx.Node, fx.Node, dict[Placement, list[int]]]]:
        """Results of the step and their readers: whole values, and gradients, placed as parameters or partial sums."""
        step = self._ways.step
        always = self._program.variable(0.0, whole=True)
        self._program.rows.append(({always: 1.0}, 1.0, 1.0))
        for node in (step.loss, *step.extras, *step.mutations.values()):
            yield step.output, node, {REPLICATED: [always]}
        parameters = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
        for name, gradient in step.gradients.items():
            parameter = self._ways.slot(parameters[name])
            given = self._given[parameter]
            yield parameter[0], gradient, {SUM if lies == REPLICATED else lies: names for lies, names in given.items()}

    def _convert(self, slot: Result, readers: list[tuple[Phase, dict[Placement, list[int]]]]) -> None:
        node, index = slot
        tensor = results_of(node)[index]
        assert tensor is not None
        given, times = self._given[slot], len(self._ways.classes.members[node])
        is_activation = node.op == "call_function" and origin(node).phase is Phase.FORWARD
        later = [asked for phase, asked in readers if is_activation and phase is Phase.BACKWARD]
        now = [asked for phase, asked in readers if not (is_activation and phase is Phase.BACKWARD)]
        if later:
            waits: dict[Placement, list[int]] = {}
            for placement in dict.fromkeys(placement for asked in (given, *later) for placement in asked):
                size = num_bytes(local_shape(tuple(tensor.shape), placement, self._num_ranks), tensor.dtype)
                price = 0.0 if is_view(node) else times * size * self._prices.seconds_per_byte
                waits[placement] = [self._program.variable(price)]
            self._program.rows.append(({name: 1.0 for names in waits.values() for name in names}, 1.0, 1.0))
            self._again[slot] = self._carry(tensor, waits, later, times)
            now.append(waits)
        self._carry(tensor, given, now, times)

    def _carry(
        self,
        tensor: Tensor,
        given: Mapping[Placement, list[int]],
        readers: list[dict[Placement, list[int]]],
        times: int,
    ) -> dict[Placement, list[int]]:
        """Bring a value from how it is given to how each reader asks for it; returns variables of what is converted.

        What a reader is given flows from one placement to another, as much of each as there is, so that the program
        without whole numbers is close to the one with them.
        """
        shared: dict[tuple[Placement, Placement], int] = {}
        for asked in readers:
            flows: dict[tuple[Placement, Placement], int] = {}
            for source in given:
                for target in asked:
                    if source != target and isinstance(source, Partial) and isinstance(target, Partial):
                        continue
                    seconds = 0.0
                    if source != target and len(readers) == 1:
                        seconds = times * self._conversion_seconds(tensor, source, target)
                    flows[source, target] = self._program.variable(seconds)
            for source, names in given.items():
                self._program.equal([name for (p, _), name in flows.items() if p == source], names)
            for target, names in asked.items():
                self._program.equal([name for (_, q), name in flows.items() if q == target], names)
            for (source, target), name in flows.items():
                if source == target:
                    continue
                if len(readers) == 1:
                    shared[source, target] = name
                    continue
                if (source, target) not in shared:
                    seconds = times * self._conversion_seconds(tensor, source, target)
                    shared[source, target] = self._program.variable(seconds)
                self._program.rows.append(({name: 1.0, shared[source, target]: -1.0}, -float("inf"), 0.0))
        converted: dict[Placement, list[int]] = {}
        for (_, target), name in shared.items():
            converted.setdefault(target, []).append(name)
        return converted
