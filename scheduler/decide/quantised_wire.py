"""Quantised communication: which buckets are sent in few bits, where the user allows it and the step becomes shorter.

Gathers in 8 bits, a second shard on each node and reductions in few bits (ZeRO++, 2306.10209) shorten what collectives
take, and add computation before and after them. The exact plan is simulated, and its collectives and waits are
replayed with each bucket's in one form or the other. From all buckets compressed, each part of that is taken back
where the step is not longer without it: what computation hides anyway stays exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zerofx.errors import UsageError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.quantise import ENCODINGS, bytes_of_values
from zerofx.ir.streams import slice_gathered, stream_of
from zerofx.passes.lib.plan_check import is_reduction
from zerofx.passes.wire.reductions import is_two_hops
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.replay import Start, TimedEvent, Wait, end_seconds, events_of
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.cost.transfers import collective_seconds
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.plan.decisions import ReduceDecision, WireDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_bytes, format_seconds

_LESS = 1e-9  # seconds that make no difference
_OF_BUCKETS = frozenset({ops.all_gather, ops.all_gather_into, *ops.REDUCTIONS})


@dataclass(frozen=True)
class WireChoice:
    """Options of a bucket on the wire: the fields of a ``WireDecision`` that cost and save."""

    gather: bool = False
    second_shard: bool = False
    reduce: bool = False

    def give_up(self, part: str) -> WireChoice:
        return replace(self, **{part: False})


@dataclass(frozen=True)
class _Sent:
    """A collective of the exact step: ``turn`` counts the gathers of one bucket's parameters, and is None for other
    collectives; ``crosses``: a sum that replicas take of their slices, each a part of it."""

    bucket: int | None
    turn: int | None
    reduces: bool
    crosses: bool
    stream: str


@dataclass(frozen=True)
class _Exact:
    """The exact step's events, and its collectives by name."""

    events: Sequence[TimedEvent]
    collectives: Mapping[str, _Sent]


def check_nodes(layout: BucketLayout, machine: Machine) -> None:
    """Check that ranks fill nodes, as hops within nodes and across them ask for.

    Raises:
        UsageError: those that a bucket is sliced over are more on one node than on another.
    """
    local, mesh = machine.ranks_per_node, layout.mesh
    for axes in sorted({bucket.reduction_axes for bucket in layout.buckets}):
        if not mesh.fills_nodes(axes, local):
            raise UsageError(
                f"expected whole nodes of {local} ranks ({machine.name}) for a wire that is not exact, found "
                f"{mesh.num_ranks} ranks ({mesh}), of which those along {', '.join(axes)} are more on one node than on "
                f"another: give a machine with other nodes, other ranks, or wire='exact'"
            )


def quantise_wire(
    plan: Plan,
    layout: BucketLayout,
    machine: Machine,
    wire: str,
    carried_out: Callable[[Plan], tuple[StepGraph, Simulation]],
    memory_budget: int | None,
) -> Plan:
    """``plan``, which is exact, with the collectives of some buckets in few bits.

    ``carried_out`` runs and simulates a plan. Second shards are given up, those of the last buckets first, where they
    do not fit ``memory_budget``; a plan that does not fit, or is not faster as simulated, stays exact.

    Raises:
        UsageError: ranks do not fill nodes.
    """
    check_nodes(layout, machine)
    allowed = replace(plan, wire=wire, ranks_per_node=min(machine.ranks_per_node, layout.num_ranks))
    if layout.num_ranks == 1:
        return _all_exact(allowed, layout, "there is one rank")
    step, exact = carried_out(plan)
    sends = _Sends(allowed, layout, machine)
    moments = _moments(step, exact)
    most = {b.index: sends.most(b, moments) for b in layout.buckets}
    chosen = _least(most, lambda choices: _replay(moments, choices, sends))
    candidate = _plan(allowed, layout, chosen, most, moments, sends)
    budget = memory_budget if memory_budget is not None else float("inf")
    shards = [index for index, choice in chosen.items() if choice.second_shard]
    while candidate.wires and not all(wire_decision.is_exact for wire_decision in candidate.wires):
        simulation = carried_out(candidate)[1]
        if simulation.live.peak_bytes <= budget:
            if simulation.step_seconds < exact.step_seconds:
                return replace(candidate, prediction=None)
            return _all_exact(allowed, layout, "the step would not be faster with it")
        if not shards:
            break
        for index in shards[len(shards) // 2 :]:
            chosen[index] = replace(chosen[index].give_up("second_shard"), gather=True)
        shards = shards[: len(shards) // 2]
        candidate = _plan(allowed, layout, chosen, most, moments, sends)
    hidden = all(wire_decision.is_exact for wire_decision in candidate.wires)
    return _all_exact(allowed, layout, "computation hides it" if hidden else "the budget has no room for more")


def _all_exact(plan: Plan, layout: BucketLayout, why: str) -> Plan:
    decisions = (WireDecision(b.index, "exact", False, "exact", f"sent exactly: {why}") for b in layout.buckets)
    return replace(plan, wires=tuple(decisions))


class _Sends:
    """Seconds of a bucket's quantised collectives on a machine."""

    def __init__(self, plan: Plan, layout: BucketLayout, machine: Machine) -> None:
        self.plan, self.layout, self.machine = plan, layout, machine
        self._away = plan.away

    def most(self, bucket: Bucket, moments: _Exact) -> WireChoice:
        """All that can be compressed of a bucket."""
        if bucket.is_lent or not bucket.compute_dtype.is_floating_point:
            return WireChoice()
        of_bucket = [c for c in moments.collectives.values() if c.bucket == bucket.index]
        turns = sum(c.turn is not None for c in of_bucket)
        num_nodes, _ = self.plan.nodes_along(bucket.gathered_over)
        second = turns > 1 and num_nodes > 1 and bucket.index not in self._away
        return WireChoice(gather=turns > 0, second_shard=second, reduce=any(c.reduces for c in of_bucket))

    def compute(self, num_bytes: float) -> float:
        """Reading and writing so many bytes together, in one kernel."""
        return self.machine.device.launch_latency + num_bytes / self.machine.memory_bandwidth

    def gather(self, bucket: Bucket) -> tuple[float, float, float]:
        """Before, during and after a gather in 8 bits."""
        small = bytes_of_values(bucket.shard_numel, ENCODINGS[self.plan.wire].gathers)
        total = small * bucket.num_ranks
        during = seconds_along("all_gather", total, bucket.mesh, bucket.gathered_over, self.machine)
        return self.compute(bucket.shard_bytes + small), during, self.compute(total + bucket.full_bytes)

    def gather_on_node(self, bucket: Bucket) -> float:
        _, local = self.plan.nodes_along(bucket.gathered_over)
        return collective_seconds("all_gather", bucket.full_bytes, local, self.machine, ranks_on_node=local)

    def second_shard(self, bucket: Bucket) -> float:
        return self.compute(2 * self.second_shard_bytes(bucket))

    def second_shard_bytes(self, bucket: Bucket) -> int:
        _, local = self.plan.nodes_along(bucket.gathered_over)
        return bucket.full_bytes // local

    def takes_two_hops(self, bucket: Bucket) -> bool:
        """True if a quantised reduction goes within nodes first."""
        return is_two_hops(*self.plan.nodes_along(bucket.reduction_axes))

    def replica_reduction(self, bucket: Bucket) -> tuple[float, tuple[tuple[float, float], ...]]:
        """The same as ``reduction``, of the hop across replicas."""
        small = bytes_of_values(bucket.shard_numel, self.plan.wire)
        during = seconds_along("all_to_all", small, bucket.mesh, bucket.crossed_over, self.machine)
        part = bucket.gradient_slice_bytes // bucket.mesh.size(bucket.crossed_over)
        return self.compute(bucket.gradient_slice_bytes + small), ((during, self.compute(small + part)),)

    def reduction(self, bucket: Bucket) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Seconds before the first hop, and of each hop on the wire and after it."""
        small = bytes_of_values(bucket.numel, self.plan.wire)
        before = self.compute(bucket.gradient_bytes + small)
        num_nodes, local = self.plan.nodes_along(bucket.reduction_axes)
        if not is_two_hops(num_nodes, local):
            during = seconds_along("all_to_all", small, bucket.mesh, bucket.reduction_axes, self.machine)
            gradient_slice = bucket.gradient_bytes // bucket.num_reduced
            return before, ((during, self.compute(small + gradient_slice)),)
        part, summed = small // local, 4 * bucket.numel // local
        within = collective_seconds("all_to_all", small, local, self.machine, ranks_on_node=local)
        across = collective_seconds("all_to_all", part, num_nodes, self.machine, ranks_on_node=1)
        between = self.compute(small + summed) + self.compute(summed + part)
        return before, ((within, between), (across, self.compute(part + bucket.gradient_slice_bytes)))


def _moments(step: StepGraph, simulation: Simulation) -> _Exact:
    turns: Counter[int] = Counter()
    collectives: dict[str, _Sent] = {}
    for node in step.calls():
        if node.target in _OF_BUCKETS:
            index = node.args[2] if node.target is ops.all_gather_into else node.args[1]
            assert isinstance(index, int)
            gathers = node.target is ops.all_gather and slice_gathered(node) is not None
            about = None if index == ops.NO_BUCKET else index
            collectives[node.name] = _Sent(
                about, turns[index] if gathers else None, node.target is ops.reduce_scatter and is_reduction(node),
                node.target is ops.reduce_scatter and not is_reduction(node), stream_of(node),
            )  # fmt: skip
            turns[index] += gathers
    return _Exact(events_of(step, simulation), collectives)


def _replay(moments: _Exact, choices: Mapping[int, WireChoice], sends: _Sends) -> float:
    """Seconds of the step with these choices."""
    return end_seconds(_events_of(moments, choices, sends))


def _events_of(exact: _Exact, choices: Mapping[int, WireChoice], sends: _Sends) -> Iterator[TimedEvent]:
    """The exact step's events with these choices."""
    late: list[Wait] = []  # for the hops across nodes that have started
    for event in exact.events:
        about = exact.collectives.get(event.name) if isinstance(event, Start | Wait) else None
        if about is None or not isinstance(event, Start | Wait):
            yield event
            continue
        bucket = sends.layout.buckets[about.bucket] if about.bucket is not None else None
        choice = choices.get(bucket.index, WireChoice()) if bucket is not None else WireChoice()
        if bucket is not None and about.reduces and choice.reduce:
            before, hops = sends.reduction(bucket)
            if isinstance(event, Start):
                yield before
                yield _start(event.name, hops[0][0], about)
                continue
            yield Wait(event.name, hops[0][1])
            earlier, late = late, []
            for seconds, after in hops[1:]:
                across = f"{event.name} across nodes"
                yield _start(across, seconds, about)
                late = [Wait(across, after)]
            yield from earlier
        elif bucket is not None and about.crosses and choice.reduce:
            before, ((seconds, after),) = sends.replica_reduction(bucket)
            yield from (
                (before, _start(event.name, seconds, about)) if isinstance(event, Start) else (Wait(event.name, after),)
            )
        elif bucket is not None and about.turn is not None and (choice.gather or choice.second_shard):
            yield from _gather(event, bucket, choice, about, sends)
        else:
            yield event
            if isinstance(event, Wait) and about.reduces:
                yield from late
                late = []
    yield from late


def _gather(
    event: Start | Wait, bucket: Bucket, choice: WireChoice, about: _Sent, sends: _Sends
) -> Iterator[TimedEvent]:
    """A gather of parameters, or the wait for it, in few bits or from second shards."""
    on_node = choice.second_shard and about.turn != 0
    before, during, after = sends.gather(bucket) if choice.gather and not on_node else (0.0, None, 0.0)
    if isinstance(event, Wait):
        yield Wait(event.name, after)
        if choice.second_shard and not on_node:
            yield sends.second_shard(bucket)
        return
    yield before
    if on_node:
        during = sends.gather_on_node(bucket)
    yield event if during is None else _start(event.name, during, about)


def _start(name: str, seconds: float, about: _Sent) -> Start:
    return Start(name, ((about.stream, seconds),))


def _least(
    most: Mapping[int, WireChoice], seconds: Callable[[Mapping[int, WireChoice]], float]
) -> dict[int, WireChoice]:
    """Of all that can be compressed, what the step is longer without; one part of one bucket after the other."""
    chosen = dict(most)
    best = seconds(chosen)
    for part in ("reduce", "gather", "second_shard"):
        for index in chosen:
            if getattr(chosen[index], part):
                tried = {**chosen, index: chosen[index].give_up(part)}
                now = seconds(tried)
                if now <= best + _LESS:
                    chosen, best = tried, now
    return chosen


def _plan(
    plan: Plan,
    layout: BucketLayout,
    chosen: Mapping[int, WireChoice],
    most: Mapping[int, WireChoice],
    moments: _Exact,
    sends: _Sends,
) -> Plan:
    """The plan with the choices; a reduction of two hops is awaited, and crosses, where the next bucket's was."""
    best = _replay(moments, chosen, sends)
    reduces: list[ReduceDecision] = []
    hops: dict[int, str | None] = {}
    for number, decision in enumerate(plan.reduces):
        if chosen[decision.bucket].reduce and sends.takes_two_hops(layout.buckets[decision.bucket]):
            hops[decision.bucket] = decision.wait_after
            following = plan.reduces[number + 1] if number + 1 < len(plan.reduces) else None
            crosses = decision.crossed_after != ""
            decision = replace(
                decision,
                wait_after=following.wait_after if following else None,
                crossed_after=((following.crossed_after if following else None) or None) if crosses else "",
                reason=f"{decision.reason}; what follows hides the hop across nodes",
            )
        reduces.append(decision)
    wires = []
    for bucket in layout.buckets:
        choice = chosen[bucket.index]
        saved = _replay(moments, {**chosen, bucket.index: WireChoice()}, sends) - best
        wires.append(
            WireDecision(
                bucket=bucket.index,
                gather=ENCODINGS[plan.wire].gathers if choice.gather else "exact",
                second_shard=choice.second_shard,
                reduce=plan.wire if choice.reduce else "exact",
                reason=_reason(plan, bucket, choice, most[bucket.index], saved, sends),
                hop_after=hops.get(bucket.index),
            )
        )
    return replace(plan, wires=tuple(wires), reduces=tuple(reduces))


def _reason(plan: Plan, bucket: Bucket, choice: WireChoice, most: WireChoice, saved: float, sends: _Sends) -> str:
    if choice == WireChoice():
        return "sent exactly: " + (
            "computation hides it" if most != WireChoice() else "it is not sent, or cannot be rounded"
        )
    parts = [
        *([f"gathered in {ENCODINGS[plan.wire].gathers}"] if choice.gather else []),
        *(
            [f"gathered again from second shards of {format_bytes(sends.second_shard_bytes(bucket))} on each node"]
            if choice.second_shard
            else []
        ),
        *([f"reduced in {plan.wire}"] if choice.reduce else []),
    ]
    rest = "" if choice == most else "; computation hides the rest"
    return f"{', '.join(parts)}: the step is {format_seconds(max(0.0, saved))} shorter than with it sent exactly{rest}"
