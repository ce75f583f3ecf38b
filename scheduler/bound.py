"""How far from the best a plan within a budget may be: the least time that any choice of kept values can take.

A plan keeps, in each repeated layer, a set of forward values and computes the rest of what backward reads again. Three
relaxations make the fastest such plan easy to bound from below:

1. *Memory is counted where all plans are alike.* Every operator of the captured graph runs in every plan, in the same
   order. While one runs, some storages live whatever is kept: parameters and states, values that forward or backward
   reads around it in any case, the parameters that it reads itself. That is its floor. To the floor comes, for each
   layer that is *waiting* (its forward is over, its backward not begun), all that the layer keeps. What a layer
   computes again, and gathers that are held longer than their readers, are left out. So a plan within the budget keeps,
   at every operator, at most ``budget - floor`` bytes in the waiting layers.
   Compiled regions keep their own values where they like; what passes from one run of a layer to the next lives
   nevertheless, so that for them the same is said of the borders between runs instead of the operators.
2. *One operator at a time.* Each operator gives a bound; the largest holds.
3. *Prices.* For each price, bytes plus price times seconds of a layer is least for a minimum cut
   (``scheduler.activations.cheapest``); by these cuts, layers that keep at most so many bytes compute at least so many
   seconds again. Over all prices the best such bound is the fractional knapsack over the convex hulls of the layers'
   (bytes, seconds), found here exactly: free what has to be freed at the best rates, the last part in proportion.

Not counted: integrality, the memory of what is being computed again, exposed communication. The bound is valid for
plans that keep or recompute; a plan that offloads may beat it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.buckets import BucketLayout
from zerofx.graph import Phase, Role, StepGraph, origin, placeholder
from zerofx.passes.recompute import recompute
from zerofx.scheduler.activations import Level, Segment, Storage, bytes_of, cheapest, is_forward_call, segments
from zerofx.scheduler.costs import node_cost
from zerofx.scheduler.liveness import liveness
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.plan import Plan
from zerofx.scheduler.simulate import gradient_bytes
from zerofx.scheduler.storage import is_view, storage_bytes, storage_source, tensors_of
from zerofx.scheduler.workspace import workspace_bytes

_ROUNDING = 1e-9  # sums of seconds are floats: what is called a bound stays below the exact one


@dataclass(frozen=True)
class Bound:
    """Seconds of computation in a step that come from a budget alone.

    ``extra_seconds_planned`` is what the plan computes again. No plan that keeps or recomputes, within the same budget,
    has less than ``extra_seconds_at_least``; infinite where none fits. ``at`` names the operator that decides it.
    """

    extra_seconds_at_least: float
    extra_seconds_planned: float
    at: str


@dataclass(frozen=True)
class Exchange:
    """A step along a layer's convex hull: bytes that are freed, and the seconds that it costs."""

    freed_bytes: int
    seconds: float


def with_least_seconds(
    plan: Plan,
    step: StepGraph,
    layout: BucketLayout,
    machine: Machine,
    *,
    on_cpu: bool,
    by_region: bool = False,
) -> Plan:
    """``plan`` with ``Prediction.least_seconds``, where it has a budget and only keeps and recomputes."""
    if plan.memory_budget is None or plan.prediction is None or plan.offloads or plan.states:
        return plan
    found = bound(plan, step, layout, machine, on_cpu=on_cpu, by_region=by_region)
    busy = plan.step_seconds - plan.exposed_seconds
    least = busy - found.extra_seconds_planned + found.extra_seconds_at_least
    return plan.with_prediction(replace(plan.prediction, least_seconds=least))


def bound(
    plan: Plan,
    step: StepGraph,
    layout: BucketLayout,
    machine: Machine,
    *,
    on_cpu: bool,
    by_region: bool = False,
) -> Bound:
    """The bound for ``plan``, which has a prediction and a budget, on the captured graph ``step`` that it was made for.

    ``on_cpu`` as for ``scheduler.liveness``. ``by_region``: whether the budget was compared with the memory of compiled
    regions, rather than with that of operators one by one.
    """
    assert plan.memory_budget is not None
    parts = segments(step)
    facts = _Facts(step, parts)
    floors = _border_floors(facts, plan, layout) if by_region else _floors(facts, plan, layout, on_cpu)
    hulls = _hulls(facts, machine)
    least, at = 0.0, ""
    for waiting, position in _tightest(facts, floors):
        start = sum(hulls[number][0].num_bytes for number in waiting)
        missing = floors[position] + start - plan.memory_budget
        exchanges = [e for number in waiting for e in _exchanges(hulls[number])]
        seconds = least_seconds_to_free(missing, exchanges)
        if seconds > least:
            least, at = seconds, facts.nodes[position].name
    planned = step.clone()
    recompute(planned, frozenset(d.value for d in plan.recomputes), frozenset(plan.extra_keeps))
    extra = _compute_seconds(planned, machine) - _compute_seconds(step, machine)
    return Bound(least * (1 - _ROUNDING), extra, at)


def least_seconds_to_free(missing: int, exchanges: Sequence[Exchange]) -> float:
    """Least seconds that free ``missing`` bytes when exchanges may be made in part: the fractional knapsack."""
    seconds = 0.0
    for exchange in sorted(exchanges, key=lambda e: e.seconds / e.freed_bytes):
        if missing <= 0:
            break
        share = min(1.0, missing / exchange.freed_bytes)
        seconds += share * exchange.seconds
        missing -= exchange.freed_bytes
    return seconds if missing <= 0 else float("inf")


def convex_hull(segment: Segment, sizes: Sequence[int], seconds: Mapping[fx.Node, float]) -> list[Level]:
    """The corners of the lower convex hull of (bytes, seconds) over all that may be kept, least seconds first.

    Between two corners the cut at the price of their slope lies on the hull: either it finds a corner in between, or
    there is none. Bytes are whole numbers, so that a price of less than one byte for all seconds together finds the
    least bytes.
    """
    positive = [s for s in seconds.values() if s > 0]
    dear = 2 * (sum(sizes) + 1) / min(positive) if positive else 1.0
    cheap = 0.5 / sum(positive) if positive else 1.0
    first, last = (cheapest(segment, sizes, seconds, price) for price in (dear, cheap))
    return [first, *_between(segment, sizes, seconds, first, last)]


def _between(
    segment: Segment, sizes: Sequence[int], seconds: Mapping[fx.Node, float], left: Level, right: Level
) -> list[Level]:
    """The corners behind ``left`` up to ``right``."""
    freed, paid = left.num_bytes - right.num_bytes, right.seconds - left.seconds
    if freed <= 0 or paid <= 0:
        return []
    price = freed / paid
    found = cheapest(segment, sizes, seconds, price)
    gain = left.num_bytes + price * left.seconds - (found.num_bytes + price * found.seconds)
    if gain <= 1e-12 * left.num_bytes:
        return [right]
    before = _between(segment, sizes, seconds, left, found)
    return [*before, *_between(segment, sizes, seconds, found, right)]


def _exchanges(hull: Sequence[Level]) -> Iterator[Exchange]:
    for before, after in itertools.pairwise(hull):
        yield Exchange(before.num_bytes - after.num_bytes, after.seconds - before.seconds)


class _Facts:
    """Where storages of the captured graph are made and read, as positions in the order of execution."""

    def __init__(self, step: StepGraph, parts: Sequence[Segment]) -> None:
        self.step, self.parts = step, parts
        self.nodes = list(step.graph.nodes)
        self.order = step.positions()
        self.sizes = liveness(step, on_cpu=False).sizes
        self.stays = _stays(step)
        self.readers: dict[Storage, list[fx.Node]] = {}
        for node in step.calls():
            for storage in dict.fromkeys(storage_source(source) for source in node.all_input_nodes):
                self.readers.setdefault(storage, []).append(node)
        self.optional = {part.values[i] for part in parts for i in part.needed - part.fixed}

    def always_runs(self, node: fx.Node) -> bool:
        """Whether the node computes at its place in every plan."""
        if node.op != "call_function" or is_view(node):
            return False
        return origin(node).phase is Phase.BACKWARD or node in self.stays

    def positions(self, storage: Storage, phase: Phase, *, views: bool) -> list[int]:
        """Where ``storage`` is read in a phase by operators that no plan leaves out; by views too if asked."""
        return [
            self.order[node]
            for node in self.readers.get(storage, ())
            if origin(node).phase is phase
            and (phase is Phase.BACKWARD or node in self.stays)
            and (views or not is_view(node))
        ]

    def waits(self, part: Segment) -> tuple[int, int]:
        """The positions, both left out, between which all that a segment keeps is live."""
        begin = max(self.order[node] for node in part.operators)
        for i, storage in enumerate(part.values):
            if i not in part.fixed:
                begin = max([begin, *self.positions(storage, Phase.FORWARD, views=False)])
        ends = [
            position
            for i in part.needed - part.fixed
            for position in self.positions(part.values[i], Phase.BACKWARD, views=True)
        ]
        return begin, min(ends, default=begin)


def _stays(step: StepGraph) -> set[fx.Node]:
    """Forward calls that every plan runs in forward: the loss or a buffer's next value depends on them.

    What only backward reads may move there as a whole.
    """
    pending = [step.loss, *step.mutations.values()]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found and is_forward_call(node):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _floors(facts: _Facts, plan: Plan, layout: BucketLayout, on_cpu: bool) -> dict[int, int]:
    """Bytes that live while an operator runs, whatever is kept, by the operator's position."""
    changes: Counter[int] = Counter()
    for first, last, size in _stretches(facts, layout):
        changes[first] += size
        changes[last + 1] -= size
    live, floors = _persistent_bytes(facts.step, plan, layout), {}
    gathered = _gathered_bytes(facts.step, layout) if plan.gathers_parameters else {}
    for position, node in enumerate(facts.nodes):
        live += changes[position]
        if facts.always_runs(node):
            floors[position] = live + gathered.get(node, 0) + (workspace_bytes(node) if on_cpu else 0)
    return floors


def _border_floors(facts: _Facts, plan: Plan, layout: BucketLayout) -> dict[int, int]:
    """Bytes that live, whatever is kept, between two runs of nodes of one layer and phase; by the first's last node."""
    changes: Counter[int] = Counter()
    for first, last, size in _stretches(facts, layout):
        changes[first] += size
        changes[last] -= size
    live, floors = _persistent_bytes(facts.step, plan, layout), {}
    computing = [node for node in facts.nodes if facts.always_runs(node)]
    homes = {node: (facts.step.unit_of(node), origin(node).phase) for node in computing}
    borders = {one for one, other in itertools.pairwise(computing) if homes[one] != homes[other]}
    for position, node in enumerate(facts.nodes):
        live += changes[position]
        if node in borders:
            floors[position] = live
    return floors


def _stretches(facts: _Facts, layout: BucketLayout) -> Iterator[tuple[int, int, int]]:
    """First and last position, and bytes, of all that is live in every plan."""
    for storage, size in facts.sizes.items():
        for first, last in _always_live(facts, storage):
            yield first, last, size
    gradients = facts.step.gradients
    for bucket in layout.buckets:
        if bucket.trainable:
            # The flat buffer of a bucket's gradients, while it is being filled.
            filled = [facts.order[gradients[slot.name]] for slot in bucket.slots]
            yield min(filled), max(filled), bucket.full_bytes


def _always_live(facts: _Facts, storage: Storage) -> Iterator[tuple[int, int]]:
    """The stretches of positions, ends included, in which a storage lives in every plan."""
    maker = storage[0]
    made = facts.order[maker]
    forward = facts.positions(storage, Phase.FORWARD, views=False)
    backward = facts.positions(storage, Phase.BACKWARD, views=False)
    if origin(maker).phase is Phase.BACKWARD:
        yield made, max([made, *backward])
    elif storage in facts.optional or not backward:
        if maker in facts.stays:
            yield made, max([made, *forward])
        if backward:
            # Kept or computed again, once, before its first reader: it is there until its last.
            yield min(backward), max(backward)
    else:
        yield made, max(backward)


def _persistent_bytes(step: StepGraph, plan: Plan, layout: BucketLayout) -> int:
    """Bytes that live throughout the step: parameters or slices of them, masters, states, buffers, and the batch."""
    assert plan.prediction is not None
    gradients = sum(gradient_bytes(bucket, plan) for bucket in layout.buckets if bucket.trainable)
    roles = (Role.BUFFER, Role.INPUT, Role.CONSTANT)
    given = sum(storage_bytes(t) for role in roles for node in step.placeholders(role) for t in tensors_of(node))
    return plan.prediction.model_state_bytes - gradients + given


def _gathered_bytes(step: StepGraph, layout: BucketLayout) -> dict[fx.Node, int]:
    """Bytes of the gathered buckets that an operator reads."""
    found: dict[fx.Node, int] = {}
    for node in step.calls():
        sources = {storage_source(source)[0] for source in node.all_input_nodes}
        read = {
            layout.slot_of(placeholder(source).name)[0].index
            for source in sources
            if source.op == "placeholder" and placeholder(source).role is Role.PARAMETER
        }
        if read:
            found[node] = sum(layout.buckets[index].full_bytes for index in read)
    return found


def _tightest(facts: _Facts, floors: Mapping[int, int]) -> list[tuple[tuple[int, ...], int]]:
    """For each set of waiting segments that occurs, the position of the highest floor."""
    spans = [facts.waits(part) for part in facts.parts]
    best: dict[tuple[int, ...], int] = {}
    for position, floor in floors.items():
        waiting = tuple(n for n, (begin, end) in enumerate(spans) if begin < position < end)
        if waiting and (waiting not in best or floor > floors[best[waiting]]):
            best[waiting] = position
    return list(best.items())


def _hulls(facts: _Facts, machine: Machine) -> list[list[Level]]:
    """For each segment the hull of what it may keep, without what is kept in any case.

    Values of other segments count nothing here, as they count where they are made; nor do operators that a plan can
    move to backward instead of running them twice.
    """
    known: dict[Hashable, list[Level]] = {}
    found = []
    for part in facts.parts:
        key = part.key, tuple(node in facts.stays for node in part.operators)
        if key not in known:
            made = set(part.operators)
            sizes = [bytes_of(s) if s[0] in made and i not in part.fixed else 0 for i, s in enumerate(part.values)]
            seconds = {n: node_cost(n, machine).seconds if n in facts.stays else 0.0 for n in part.operators}
            known[key] = convex_hull(part, sizes, seconds)
        found.append(known[key])
    return found


def _compute_seconds(step: StepGraph, machine: Machine) -> float:
    return sum(node_cost(node, machine).seconds for node in step.calls())
