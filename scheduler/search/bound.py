"""Lower bound of step time within a budget: the least time that any choice of kept values can take.

A plan keeps, in each repeated layer, a set of forward values and computes the rest of what backward reads again. Three
relaxations make the fastest such plan easy to bound from below:

1. *Memory is counted where all plans are alike.* The captured graph consists of *runs*, stretches of operators of one
   layer, or one piece of what is outside layers, and one phase. Plans add operators, and may put one off inside its
   run, or out of it if nothing there needs it; all else runs where it did. So there are moments, between two runs or
   while some operator computes, in which certain storages live whatever is kept: parameters and states, forward values
   that are read later in any case, what the operator itself reads and makes. That is the moment's floor. To it comes,
   for each layer or piece that is *waiting* (its forward is over, its backward not begun), all that it keeps. A plan
   within the budget therefore keeps, at every moment, at most ``budget - floor`` bytes in those that wait.
2. *One moment at a time.* Each moment gives a bound; the largest holds.
3. *Prices.* For each price, bytes plus price times seconds of a layer is least for a minimum cut
   (``scheduler.decide.activations.cheapest``); by these cuts, layers that keep at most so many bytes compute at least
   so many seconds again. Over all prices the best such bound is the fractional knapsack over the convex hulls of the
   layers' (bytes, seconds), found here exactly: free what has to be freed at the best rates, the last part in
   proportion.

Not counted: integrality, the memory of what is being computed again, backward's own values, gathers and gradients
around a moment, exposed communication. The bound is for plans that keep or recompute; one that offloads may beat it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.aliasing import Storage, is_view, storage_bytes, storage_source, tensors_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import Phase, Role, origin, piece_of, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import times_run
from zerofx.passes.activations.recompute import recompute
from zerofx.passes.divide import divide
from zerofx.scheduler.analysis.pieces import forward_runs, pieces
from zerofx.scheduler.analysis.saved_values import is_forward_call, saved_storages, storage_size
from zerofx.scheduler.cost.cpu.workspace import workspace_bytes
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.simulate import gradient_bytes
from zerofx.scheduler.decide.activations import Segment, cheapest, segments
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.order import Move, moves_of

_ROUNDING = 1e-9  # sums of seconds are floats: what is called a bound stays below the exact one


@dataclass(frozen=True)
class Bound:
    """Seconds of computation in a step that come from a budget alone.

    ``extra_seconds_planned`` is what the plan computes again. No plan that keeps or recomputes, within the same budget,
    has less than ``extra_seconds_at_least``; infinite where none fits.
    """

    extra_seconds_at_least: float
    extra_seconds_planned: float


def add_least_seconds(
    plan: Plan,
    step: StepGraph,
    layout: BucketLayout,
    machine: Machine,
    *,
    on_cpu: bool,
    by_region: bool = False,
) -> Plan:
    """``plan`` with ``Prediction.least_seconds``, where it has a budget and only keeps and recomputes."""
    moves = len(plan.absences) > len(plan.recomputes) or plan.tiles
    if plan.memory_budget is None or plan.prediction is None or moves:
        return plan
    bounded = bound(plan, step, layout, machine, on_cpu=on_cpu, by_region=by_region)
    busy = plan.step_seconds - plan.exposed_seconds
    least = busy - bounded.extra_seconds_planned + bounded.extra_seconds_at_least
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

    ``on_cpu`` as for ``scheduler.cost.liveness``. ``by_region``: whether the budget was compared with the memory of
    compiled regions, rather than with that of operators one by one.
    """
    assert plan.memory_budget is not None
    # A plan divides what is outside layers in one of these ways.
    bounds, tried = [], []
    for divides in (False, True):
        marked = step.clone()
        runs = forward_runs(marked, saved_storages(marked), divides=divides)
        divided = pieces(marked, runs)
        if divided not in tried:
            tried.append(divided)
            divide(marked, divided)
            facts = _Facts(marked, segments(marked, runs), by_region=by_region)
            bounds.append(_least(facts, plan, layout, machine, on_cpu=on_cpu))
    planned = step.clone()
    recompute(planned, frozenset(d.value for d in plan.recomputes), frozenset(plan.extra_keeps))
    extra = _compute_seconds(planned, machine) - _compute_seconds(step, machine)
    return Bound(min(bounds) * (1 - _ROUNDING), extra)


def _least(facts: _Facts, plan: Plan, layout: BucketLayout, machine: Machine, *, on_cpu: bool) -> float:
    """The least seconds to compute again."""
    assert plan.memory_budget is not None
    persistent = _persistent_bytes(facts.step, plan, layout)
    hulls = _hulls(facts, machine)
    least = 0.0
    for waiting, moment in _tightest(facts, _moments(facts, plan, layout, on_cpu=on_cpu)):
        start = sum(hulls[number][0].num_bytes for number in waiting)
        missing = persistent + moment.floor + start - plan.memory_budget
        moves = [move for number in waiting for move in moves_of(number, hulls[number])]
        least = max(least, least_seconds_to_free(missing, moves))
    return least


def least_seconds_to_free(missing: int, moves: Sequence[Move]) -> float:
    """Least seconds that free ``missing`` bytes when moves may be made in part: the fractional knapsack."""
    seconds = 0.0
    for move in sorted(moves, key=lambda move: move.extra_seconds / move.freed_bytes):
        if missing <= 0:
            break
        share = min(1.0, missing / move.freed_bytes)
        seconds += share * move.extra_seconds
        missing -= move.freed_bytes
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
    return [first, *_corners_between(segment, sizes, seconds, first, last)]


def _corners_between(
    segment: Segment,
    sizes: Sequence[int],
    seconds: Mapping[fx.Node, float],
    left: Level,
    right: Level,
) -> list[Level]:
    """The corners after ``left`` up to ``right``."""
    freed, paid = left.num_bytes - right.num_bytes, right.seconds - left.seconds
    if freed <= 0 or paid <= 0:
        return []
    price = freed / paid
    corner = cheapest(segment, sizes, seconds, price)
    gain = left.num_bytes + price * left.seconds - (corner.num_bytes + price * corner.seconds)
    if gain <= 1e-12 * left.num_bytes:
        return [right]
    before = _corners_between(segment, sizes, seconds, left, corner)
    return [*before, *_corners_between(segment, sizes, seconds, corner, right)]


@dataclass(frozen=True)
class _Moment:
    """A time in every plan: after all before position ``first``, and before all after ``last``.

    ``floor`` are bytes that live then in any case, besides what lives throughout the step.
    """

    first: int
    last: int
    floor: int


class _Facts:
    """Positions, in the order of execution, at which storages of the captured graph are made and read."""

    def __init__(self, step: StepGraph, parts: Sequence[Segment], *, by_region: bool) -> None:
        self.step, self.parts, self.by_region = step, parts, by_region
        self.order = step.positions()
        self.sizes = liveness(step, on_cpu=False).sizes
        self.stays = _stays(step)
        self.optional = {part.values[i] for part in parts for i in part.needed - part.fixed}
        self._readers: dict[Storage, list[fx.Node]] = {}
        for node in step.calls():
            for storage in dict.fromkeys(storage_source(source) for source in node.all_input_nodes):
                self._readers.setdefault(storage, []).append(node)
        self.runs = self._find_runs()

    def readers(self, storage: Storage, phase: Phase, *, views: bool = False) -> list[fx.Node]:
        """Nodes that read ``storage`` in a phase and are in every plan; views too if asked."""
        readers = self._readers.get(storage, ())
        return [n for n in readers if origin(n).phase is phase and self._is_always_run(n) and (views or not is_view(n))]

    def waits(self, part: Segment) -> tuple[int, int]:
        """The last position before, and the first after, the stretch in which all that a segment keeps is live."""
        begin = max(self.order[node] for node in part.operators)
        for i, storage in enumerate(part.values):
            if i not in part.fixed:
                begin = max([begin, *(self.order[node] for node in self.readers(storage, Phase.FORWARD))])
        read = [n for i in part.needed - part.fixed for n in self.readers(part.values[i], Phase.BACKWARD, views=True)]
        return begin, min((self.order[node] for node in read), default=begin)

    def live_span(self, storage: Storage) -> tuple[int, int] | None:
        """The stretch of positions, ends included, in which a forward storage lives in every plan."""
        maker = storage[0]
        if not is_forward_call(maker):
            return None
        backward = [] if storage in self.optional else self.readers(storage, Phase.BACKWARD)
        if not backward and maker not in self.stays:
            return None
        readers = backward or self.readers(storage, Phase.FORWARD)
        return self.order[maker], max((self.order[node] for node in readers), default=self.order[maker])

    def stay_in_run(self) -> set[fx.Node]:
        """Operators that no plan puts off to a later run: something needs them in their own, or another layer does."""
        run_of = {node: number for number, run in enumerate(self.runs) for node in run}
        staying = set(self.stays)
        for node in reversed(list(run_of)):
            storages = _outputs_of(node, self.sizes)
            readers = [reader for storage in storages for reader in self.readers(storage, Phase.BACKWARD)]
            needed = any(run_of[reader] == run_of[node] and reader in staying for reader in readers)
            elsewhere = all(self.home_of(reader) != self.home_of(node) for reader in readers)
            if needed or (readers and elsewhere):
                staying.add(node)
        return staying

    def home_of(self, node: fx.Node) -> tuple[str, str | None]:
        """The layer or piece that a plan leaves an operator in; regions need not end where a piece does."""
        return self.step.unit_of(node), None if self.by_region else piece_of(node)

    def _is_always_run(self, node: fx.Node) -> bool:
        return origin(node).phase is Phase.BACKWARD or node in self.stays

    def _find_runs(self) -> list[list[fx.Node]]:
        """Stretches of operators of one layer or piece and one phase, without those that a plan may leave out."""
        computing = (n for n in self.step.calls() if not is_view(n) and self._is_always_run(n))
        return [list(run) for _, run in itertools.groupby(computing, lambda n: (self.home_of(n), origin(n).phase))]


def _outputs_of(node: fx.Node, sizes: Mapping[Storage, int]) -> list[Storage]:
    return [(node, index) for index in range(len(tensors_of(node))) if (node, index) in sizes]


def _stays(step: StepGraph) -> set[fx.Node]:
    """Forward calls that every plan runs in forward: the loss or a buffer's next value depends on them.

    What only backward reads may move there as a whole.
    """
    pending = [step.loss, *step.extras, *step.mutations.values()]
    needed: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in needed and is_forward_call(node):
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def _moments(facts: _Facts, plan: Plan, layout: BucketLayout, *, on_cpu: bool) -> Iterator[_Moment]:
    """The moments between two runs, and unless regions are compiled those in which an operator computes."""
    begins = [facts.order[run[0]] for run in facts.runs]
    ends = [facts.order[run[-1]] for run in facts.runs]
    across: Counter[int] = Counter()  # by run: live from before its begin until after its end
    after: Counter[int] = Counter()  # by run: live after its end
    stretches = {storage: stretch for storage in facts.sizes if (stretch := facts.live_span(storage)) is not None}
    for storage, (first, last) in stretches.items():
        size, stop = facts.sizes[storage], bisect_left(ends, last)
        for counts, start in ((across, bisect_right(begins, first)), (after, bisect_left(ends, first))):
            if start < stop:
                counts[start] += size
                counts[stop] -= size
    gathered = _bucket_bytes_read(facts.step, layout) if plan.gathers_parameters else {}
    stay = facts.stay_in_run()
    inside = outside = 0
    for number, run in enumerate(facts.runs):
        begin, end = begins[number], ends[number]
        inside, outside = inside + across[number], outside + after[number]
        # Where forward turns into backward inside one layer, a region may reach from the one into the other.
        following = facts.runs[number + 1][0] if number + 1 < len(facts.runs) else run[-1]
        if not facts.by_region or facts.step.unit_of(following) != facts.step.unit_of(run[-1]):
            yield _Moment(end + 1, end, outside)
        for node in () if facts.by_region else run:
            if node in stay:
                own = dict.fromkeys([*map(storage_source, node.all_input_nodes), *_outputs_of(node, facts.sizes)])
                apart = [s for s in own if s in facts.sizes and not _covers(stretches.get(s), begin, end)]
                size = sum(facts.sizes[storage] for storage in apart) + gathered.get(node, 0)
                yield _Moment(begin, end, inside + size + (workspace_bytes(node) if on_cpu else 0))


def _covers(stretch: tuple[int, int] | None, begin: int, end: int) -> bool:
    return stretch is not None and stretch[0] < begin and stretch[1] > end


def _persistent_bytes(step: StepGraph, plan: Plan, layout: BucketLayout) -> int:
    """Bytes that live throughout the step: parameters or slices of them, masters, states, buffers, and the batch."""
    assert plan.prediction is not None
    gradients = sum(gradient_bytes(bucket, plan) for bucket in layout.buckets if bucket.trainable)
    roles = (Role.BUFFER, Role.INPUT, Role.CONSTANT, Role.OUTSIDE, Role.RANK, Role.HOST_RANK, Role.LOSS_SCALE)
    given = sum(storage_bytes(t) for role in roles for node in step.placeholders(role) for t in tensors_of(node))
    return plan.prediction.model_state_bytes - gradients + given


def _bucket_bytes_read(step: StepGraph, layout: BucketLayout) -> dict[fx.Node, int]:
    """Bytes of the gathered buckets that an operator reads."""
    gathered: dict[fx.Node, int] = {}
    for node in step.calls():
        sources = {storage_source(source)[0] for source in node.all_input_nodes}
        read = {
            layout.slot_of(placeholder(source).name)[0].index
            for source in sources
            if source.op == "placeholder" and placeholder(source).role is Role.PARAMETER
        }
        if read:
            gathered[node] = sum(layout.buckets[index].full_bytes for index in read)
    return gathered


def _tightest(facts: _Facts, moments: Iterable[_Moment]) -> list[tuple[tuple[int, ...], _Moment]]:
    """For each set of waiting segments that occurs, the moment of the highest floor."""
    spans = [facts.waits(part) for part in facts.parts]
    best: dict[tuple[int, ...], _Moment] = {}
    for (first, last), group in itertools.groupby(moments, lambda moment: (moment.first, moment.last)):
        waiting = tuple(n for n, (begin, end) in enumerate(spans) if begin < first and end > last)
        highest = max(group, key=lambda moment: moment.floor)
        if waiting and (waiting not in best or highest.floor > best[waiting].floor):
            best[waiting] = highest
    return list(best.items())


def _hulls(facts: _Facts, machine: Machine) -> list[list[Level]]:
    """For each segment the hull of what it may keep, without what is kept in any case.

    Values of other segments count nothing here, as they count where they are made; nor do operators that a plan can
    move to backward instead of running them twice.
    """
    known: dict[Hashable, list[Level]] = {}
    hulls = []
    for part in facts.parts:
        key = part.key, tuple(node in facts.stays for node in part.operators)
        if key not in known:
            own = set(part.operators)
            sizes = [storage_size(s) if s[0] in own and i not in part.fixed else 0 for i, s in enumerate(part.values)]
            seconds = {n: node_cost(n, machine).seconds if n in facts.stays else 0.0 for n in part.operators}
            known[key] = convex_hull(part, sizes, seconds)
        hulls.append(known[key])
    return hulls


def _compute_seconds(step: StepGraph, machine: Machine) -> float:
    """Seconds of computation, of a loop over micro-batches in all rounds."""
    times = times_run(step)
    return sum(times[node] * node_cost(node, machine).seconds for node in step.calls())
