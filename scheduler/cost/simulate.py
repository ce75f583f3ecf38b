"""Run a step graph on paper: streams as resources, time and bytes of every node, on a machine that need not exist.

Computation runs in the graph's order on one stream, collectives in theirs on another, and the copies between tiers on
one for each link and direction. What is started begins when its stream is free and computation has reached it, a second
leg when the first is done; a wait holds computation until then. What computation waits for is *exposed*. Updates on the
host run on a lane of their own: one begins when the host is free and its copies are there, and copies of what it writes
when it is done. A copy that waits for the host leaves its link to others meanwhile. What is delayed or runs on ends
beyond the step, and the next one begins with it under way: a step is simulated as one among steps like it, and takes as
long as from its begin to that of the next. (The emitted step behaves so; see ``zerofx/runtime/comm/gloo.py``,
``zerofx/runtime/comm/nccl.py`` and ``zerofx/runtime/tiers/tiers.py``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes, storage_source
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Role, host_bucket, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loops_of, times_run
from zerofx.ir.streams import LINKS, background_work, hops_of, num_gathers_after, runs_on_host, stream_of
from zerofx.scheduler.cost.categories import peak_memory
from zerofx.scheduler.cost.liveness import Liveness, liveness
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.transfers import collective_latency, collective_seconds, copy_seconds, wire_bytes
from zerofx.scheduler.cost.wire_volume import collective_of, node_wire_bytes
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan

T = TypeVar("T")

_STEPS_TO_SETTLE = 8  # simulated steps until each begins with the same under way; two, as a rule
_SAME_SECONDS = 1e-9  # what two steps like each other differ by, as their seconds are rounded


@dataclass(frozen=True)
class Leg:
    """One leg of a copy between tiers on its stream: seconds from the step's begin, and bytes moved."""

    stream: str
    start_seconds: float
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class NodeTiming:
    """One node in the simulated step: seconds from its begin, and what it moves and computes.

    ``legs`` are those of a copy between tiers, in order; the node's own time spans them. ``num_runs`` is how often it
    runs: what is said of a node in a loop over micro-batches is said of its first run.
    """

    start_seconds: float
    seconds: float
    exposed_seconds: float
    bytes_read: int
    bytes_written: int
    wire_bytes: int
    flops: int
    legs: tuple[Leg, ...] = ()
    num_runs: int = 1


@dataclass(frozen=True)
class Simulation:
    """A simulated step, per rank: a timing for each call of the graph in order, and its live bytes.

    ``step_seconds``: until computation ends, and the next step begins, with what is delayed or runs on under way.
    ``node_wire_bytes``: what the ranks of the first node send together, ``"within"`` it and ``"across"`` nodes.
    """

    timings: dict[fx.Node, NodeTiming]
    live: Liveness
    step_seconds: float
    node_wire_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        return sum(t.num_runs * t.exposed_seconds for t in self.timings.values())

    @property
    def busy_by_stream(self) -> dict[str, float]:
        """Seconds in which each stream has something to do; streams without are left out."""
        by_stream: dict[str, float] = {}
        for node, timing in self.timings.items():
            for stream, seconds in (
                [(leg.stream, leg.seconds) for leg in timing.legs] or [(stream_of(node), timing.seconds)]
            ):  # fmt: skip
                if seconds:
                    by_stream[stream] = by_stream.get(stream, 0.0) + timing.num_runs * seconds
        return by_stream

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes moved between tiers by stream; streams without are left out."""
        moved: dict[str, int] = {}
        for timing in self.timings.values():
            for leg in timing.legs:
                moved[leg.stream] = moved.get(leg.stream, 0) + timing.num_runs * leg.num_bytes
        return {stream: moved[stream] for stream in LINKS if stream in moved}

    @property
    def wire_bytes(self) -> int:
        return sum(t.num_runs * t.wire_bytes for t in self.timings.values())

    @property
    def flops(self) -> int:
        return sum(t.num_runs * t.flops for t in self.timings.values())


def simulate(
    step: StepGraph,
    machine: Machine,
    mesh: Mesh,
    *,
    on_cpu: bool,
    compiles_regions: bool = False,
    measured: Mapping[str, float] | None = None,
) -> Simulation:
    """Simulate one step of one rank; see the module for the rules, and ``liveness`` for what is asked.

    ``measured``: seconds by node name that replace what ``machine`` predicts (``MeasuredCosts.seconds_by_node``). With
    delayed updates it is a step among steps like it.
    """
    live = liveness(step, on_cpu, compiles_regions=compiles_regions)
    collectives = [
        node for node, times in times_run(step).items() for _ in range(times) if node.target in ops.COLLECTIVES
    ]
    sent = node_wire_bytes(collectives, mesh, machine.ranks_per_node, pairwise=on_cpu)
    slowest, before = None, _UnderWay()
    for number in range(_STEPS_TO_SETTLE):
        clocks = _run(step, machine, mesh, measured, before)
        # Where steps take turns at being longer, the longest of them is what is said of all.
        if slowest is None or number < 2 or clocks.compute > slowest.compute:
            slowest = clocks
        left = clocks.work_left()
        if left.is_like(before):
            slowest = clocks
            break
        before = left
    assert slowest is not None
    timings = {  # of copies that run on, as they did in the step before
        node: replace(slowest.timings[node], num_runs=times) if times > 1 else slowest.timings[node]
        for node, times in times_run(step).items()
    }
    return Simulation(timings, live, slowest.compute, sent)


@dataclass(frozen=True)
class _UnderWay:
    """Work that still runs as a step begins, in seconds from there.

    Until when the ``host`` and ``links`` are busy; when updates on the host are done, by bucket (``settled``), and by
    what is kept in a slower tier (``updated``), and when that was copied last (``landed``); which copies run on, by
    what ``settle`` awaits, when they are ``done``, and when those may begin that wait for the host (``held_back``).
    """

    host: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    settled: Mapping[int, float] = field(default_factory=dict)
    updated: Mapping[fx.Node, float] = field(default_factory=dict)
    landed: Mapping[fx.Node, float] = field(default_factory=dict)
    runs_on: Mapping[tuple[int, bool], tuple[fx.Node, ...]] = field(default_factory=dict)
    done: Mapping[fx.Node, float] = field(default_factory=dict)
    held_back: Mapping[fx.Node, float] = field(default_factory=dict)

    def is_like(self, other: _UnderWay) -> bool:
        """True if the other has the same work under way, at the same times."""
        if abs(self.host - other.host) > _SAME_SECONDS:
            return False
        for name in ("links", "settled", "updated", "landed", "done", "held_back"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine.keys() != others.keys() or any(abs(mine[k] - others[k]) > _SAME_SECONDS for k in mine):
                return False
        return True


def _run(
    step: StepGraph, machine: Machine, mesh: Mesh, measured: Mapping[str, float] | None, before: _UnderWay
) -> _Clocks:
    """The clocks at the end of a step that begins with what is under way ``before``."""
    clocks, loops = _Clocks(machine, mesh, measured, before), loops_of(step)
    begins, ends = {loop.begin for loop in loops}, {loop.end: loop.num_rounds for loop in loops}
    for node in step.calls():
        if node in begins:
            clocks.begin_round()
        elif node in ends:
            clocks.repeat_round(ends[node] - 1)
        clocks.run(node)
    clocks.end()
    return clocks


class _Clocks:
    """When computation (``compute``), the host and each other stream are free as calls run in order, and their timings.

    ``before``: what goes on as they begin.
    """

    def __init__(self, machine: Machine, mesh: Mesh, measured: Mapping[str, float] | None, before: _UnderWay) -> None:
        self._machine, self._mesh, self._measured, self._before = machine, mesh, measured or {}, before
        self.timings: dict[fx.Node, NodeTiming] = {}
        self.compute = 0.0
        self._round = 0.0, dict[str, float](), dict[str, float](), dict[fx.Node, float]()
        self._host = before.host
        self._collectives: dict[str, float] = {}  # by stream: one for each communicator
        self._links = {**dict.fromkeys(LINKS, 0.0), **before.links}
        self._done = dict(before.done)  # when what was started is done
        self._landed = dict(before.landed)  # when what is kept in a slower tier was last copied
        self._updated = dict(before.updated)  # when it was last updated on the host
        self._settled = dict(before.settled)  # when a bucket's update on the host is done
        self._held_back = dict(before.held_back)  # copies that begin once the host is done, with when that is
        # Copies that nothing in their step waits for, by what ``settle`` awaits.
        self._runs_on: dict[tuple[int, bool], tuple[fx.Node, ...]] = {}
        self._together: list[fx.Node] = []  # gathers that start with the next one

    def begin_round(self) -> None:
        """A loop begins: what is under way goes on by itself."""
        self._round = self.compute, dict(self._collectives), dict(self._links), dict(self._done)

    def repeat_round(self, times: int) -> None:
        """Let the round since ``begin_round`` take place ``times`` more; what it has started is then under way as now.

        Each takes as long as the first.
        """
        begun, collectives, links, done = self._round
        seconds = times * (self.compute - begun)

        def shift(now: Mapping[T, float], before: Mapping[T, float]) -> dict[T, float]:
            return {key: end + (seconds if before.get(key) != end else 0.0) for key, end in now.items()}

        self.compute += seconds
        self._collectives, self._links = shift(self._collectives, collectives), shift(self._links, links)
        self._done = shift(self._done, done)

    def end(self) -> None:
        """The step is over: copies that the host has held back until now begin, and others in the next one."""
        for copy, ready in list(self._held_back.items()):
            if copy in self._held_back and ready <= self.compute:
                self._place(copy)
        for copy in self._held_back.keys() & self.timings.keys():
            timing = self.timings[copy]
            legs = tuple(replace(leg, start_seconds=leg.start_seconds + self.compute) for leg in timing.legs)
            self.timings[copy] = replace(timing, start_seconds=timing.start_seconds + self.compute, legs=legs)

    def work_left(self) -> _UnderWay:
        """Work that still runs at the step's end, in seconds from there."""

        def keep_later(ends: Mapping[T, float]) -> dict[T, float]:
            return {key: end - self.compute for key, end in ends.items() if end > self.compute}

        updated, landed = (
            keep_later({node: end for node, end in ends.items() if node.op == "placeholder"})
            for ends in (self._updated, self._landed)
        )
        copies = {copy for copies in self._runs_on.values() for copy in copies}
        return _UnderWay(
            max(0.0, self._host - self.compute), keep_later(self._links), keep_later(self._settled), updated, landed,
            self._runs_on, keep_later({node: end for node, end in self._done.items() if node in copies}),
            {copy: ready - self.compute for copy, ready in self._held_back.items()},
        )  # fmt: skip

    def run(self, node: fx.Node) -> None:
        """Run the next call."""
        if node.target in ops.COLLECTIVES:
            self._collective(node)
        elif node.target in ops.TRANSFERS:
            self._copy(node)
        elif node.target is ops.wait:
            self._wait(node)
        elif node.target is ops.settle:
            self._settle(node)
        elif node.target is ops.run_on:
            self._run_on(node)
        elif node.target in (ops.second_shard, ops.cast_owned):
            size = storage_bytes(tensor(node))
            self._computes(node, copy_seconds(size, "device", "device", self._machine), size, size, 0)
        elif node.target in ops.EVENTS and node.target not in (ops.update_whole, *ops.SLICE_CASTS):
            self._hold(node, until=self.compute)  # bookkeeping on the host
        elif runs_on_host(node):
            self._update_on_host(node)
        else:
            cost = node_cost(node, self._machine)
            seconds = self._measured.get(node.name, cost.seconds)
            self._computes(node, seconds, cost.bytes_read, cost.bytes_written, cost.flops)

    def _computes(self, node: fx.Node, seconds: float, num_read: int, num_written: int, flops: int) -> None:
        self.timings[node] = NodeTiming(self.compute, seconds, 0.0, num_read, num_written, 0, flops)
        self.compute += seconds

    def _hold(self, node: fx.Node, *, until: float, seconds: float = 0.0) -> None:
        """Computation stands still ``until`` then, and ``node`` takes ``seconds`` of it after that."""
        exposed = max(0.0, until - self.compute)
        self.timings[node] = NodeTiming(self.compute + exposed, seconds, exposed, 0, 0, 0, 0)
        self.compute += exposed + seconds

    def _collective(self, node: fx.Node) -> None:
        self._together.append(node)
        if num_gathers_after(node):
            return
        together, stream = self._together, stream_of(node)
        ends = start = max(self._collectives.get(stream, 0.0), self.compute)
        for entry, timing in zip(together, _collectives(together, start, self._mesh, self._machine), strict=True):
            self.timings[entry] = timing
            ends = timing.start_seconds + timing.seconds
        self._collectives[stream] = ends
        self._done.update(dict.fromkeys(together, ends))
        if node.target is ops.broadcast:
            self.compute = ends
        self._together = []

    def _copy(self, node: fx.Node) -> None:
        updated = (self._updated.get(storage_source(end)[0], 0.0) for end in node.all_input_nodes)
        ready = max(self.compute, *updated)
        self._held_back[node] = ready
        self._done.pop(node, None)  # of the step before
        if ready <= self.compute:
            self._place(node)

    def _place(self, node: fx.Node) -> None:
        """Put a copy on its links, after those that are ready before it."""
        until = self._held_back[node]
        due = sorted((ready, number) for number, ready in enumerate(self._held_back.values()) if ready <= until)
        copies = list(self._held_back)
        for begin, number in due:
            copy = copies[number]
            del self._held_back[copy]
            legs = self._legs(copy, begin)
            done = self._done[copy] = legs[-1].start_seconds + legs[-1].seconds
            self._landed.update(dict.fromkeys((storage_source(end)[0] for end in copy.all_input_nodes), done))
            start, size = legs[0].start_seconds, legs[0].num_bytes
            self.timings[copy] = NodeTiming(start, done - start, 0.0, size, size, 0, 0, legs)

    def _legs(self, node: fx.Node, reached: float) -> tuple[Leg, ...]:
        """The legs of a copy that may begin when ``reached``."""
        num_bytes = storage_bytes(tensor(node))
        legs = []
        for hop in hops_of(node):
            start = max(reached, self._links[hop.stream])
            seconds = copy_seconds(num_bytes, hop.source, hop.destination, self._machine)
            reached = self._links[hop.stream] = start + seconds
            legs.append(Leg(hop.stream, start, seconds, num_bytes))
        return tuple(legs)

    def _wait(self, node: fx.Node) -> None:
        pending = node.args[0]
        assert isinstance(pending, fx.Node)
        if pending not in self._done:
            self._place(pending)
        self._hold(node, until=self._done[pending], seconds=_sum_seconds(pending, self._machine))

    def _settle(self, node: fx.Node) -> None:
        bucket, back = what = background_work(node)
        copies = self._before.runs_on.get(what, ())
        for copy in copies:
            if copy in self._held_back:
                self._place(copy)
        done = (self._done.get(copy, 0.0) for copy in copies)
        self._hold(node, until=max([0.0 if back else self._settled.get(bucket, 0.0), *done]))

    def _run_on(self, node: fx.Node) -> None:
        copies = node.args[1]
        assert isinstance(copies, list | tuple)
        self._runs_on[background_work(node)] = tuple(copy for copy in copies if isinstance(copy, fx.Node))
        self._hold(node, until=self.compute)

    def _update_on_host(self, node: fx.Node) -> None:
        """It begins when the host is free and its copies are there; computation goes on."""
        cost = node_cost(node, self._machine)
        seconds = self._machine.host_seconds(cost.flops, cost.bytes_read + cost.bytes_written)
        sources = [storage_source(source)[0] for source in node.all_input_nodes]
        start = max(self.compute, self._host, *(self._landed.get(source, 0.0) for source in sources))
        self._host = start + seconds
        bucket = host_bucket(node)
        assert bucket is not None, "what the host computes is some bucket's update"
        self._settled[bucket] = self._host
        self._updated.update(dict.fromkeys(sources, self._host))
        self.timings[node] = NodeTiming(start, seconds, 0.0, cost.bytes_read, cost.bytes_written, 0, cost.flops)


def predict(step: StepGraph, plan: Plan, layout: BucketLayout, simulation: Simulation) -> Prediction:
    """The simulation's totals as a plan carries them; the bound on its seconds is kept from its earlier prediction."""
    peak_node = simulation.live.peak_node
    return Prediction(
        peak_bytes=simulation.live.peaks,
        peak_node=peak_node.name if peak_node is not None else "",
        peak_live={str(category): size for category, size in peak_memory(step, simulation.live).items()},
        model_state_bytes=model_state_bytes(step, plan, layout),
        wire_bytes=simulation.wire_bytes,
        step_seconds=simulation.step_seconds,
        exposed_seconds=simulation.exposed_seconds,
        flops=simulation.flops,
        link_bytes=simulation.link_bytes,
        node_wire_bytes={}
        if plan.wire == "exact" and plan.replicate == plan.model == 1
        else simulation.node_wire_bytes,
        arena=simulation.live.arena,
        least_seconds=plan.prediction.least_seconds if plan.prediction is not None else None,
    )


def model_state_bytes(step: StepGraph, plan: Plan, layout: BucketLayout) -> int:
    """Bytes of parameters, gradients, master copies and flat optimizer states on one rank, padding included.

    Counted as ZeRO does (1910.02054, section 3): gradients as if all of a step's lived at once, whole at stages 0 and
    1 and sliced from stage 2 on. In bf16 with Adam that is 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes at stages 0 to
    3. A step holds less than that: each gradient goes with its update.
    """
    total = 0
    for bucket in layout.buckets:
        total += bucket.shard_bytes if bucket.is_gathered(plan.stage) else bucket.full_bytes
        if bucket.trainable:
            total += gradient_bytes(bucket, plan)
    for role in (Role.MASTER, Role.STATE):
        total += sum(storage_bytes(tensor(node)) for node in step.placeholders(role))
    return total


def gradient_bytes(bucket: Bucket, plan: Plan) -> int:
    """Bytes of a trained bucket's gradients on one rank as ``model_state_bytes`` counts them."""
    return bucket.gradient_slice_bytes if plan.stage >= 2 else bucket.gradient_bytes


def _collectives(together: list[fx.Node], start: float, mesh: Mesh, machine: Machine) -> list[NodeTiming]:
    """Timings of collectives that start as one at ``start``: the latency of the first, and the bytes of all."""
    timings: list[NodeTiming] = []
    first = collective_of(together[0], mesh, machine.ranks_per_node)
    latency = collective_latency(first.kind, first.num_ranks, machine, ranks_on_node=first.ranks_on_node)
    for node in together:
        each = collective_of(node, mesh, machine.ranks_per_node)
        alone = collective_seconds(
            each.kind, each.full_bytes, each.num_ranks, machine, ranks_on_node=each.ranks_on_node
        )
        seconds = alone - (latency if timings else 0.0)
        receives = node.target is ops.receive_value
        sent = 0 if receives else wire_bytes(each.kind, each.full_bytes, each.num_ranks)
        exposed = seconds if node.target is ops.broadcast else 0.0
        timings.append(NodeTiming(start, seconds, exposed, each.full_bytes, each.full_bytes, sent, 0))
        start += seconds
    return timings


def _sum_seconds(pending: fx.Node, machine: Machine) -> float:
    """Time of adding up the received slices of a reduction."""
    if pending.target not in ops.REDUCTIONS:
        return 0.0
    return 3 * storage_bytes(tensor(pending)) / machine.memory_bandwidth
