"""Live bytes at every node of a step graph, by storage: on the device, and on the slower tiers that the step uses.

A value's storage is allocated when the node that owns it runs, and freed after the last node that reads it, itself or
through views: exactly where the emitted step deletes the last name that holds it. Placeholders (parameters, states,
buffers, the batch) live throughout. What runs on into the next step (``ops.run_on``) is there until that settles it,
and so where a step begins, which is one among steps like it. A copy between tiers holds its source and its result from
its start to its wait; one that leads to or comes from nvme passes through a buffer of its size on the host.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, aliased_input, is_view, storage_bytes, storage_source, tensors_of
from zerofx.ir.facts import DEVICE, placeholder, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_numbers, loops_of, times_held
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.ir.streams import background_work, hops_of, runs_on_host
from zerofx.scheduler.cost.cpu.workspace import memories
from zerofx.scheduler.cost.transfers import size_class
from zerofx.scheduler.plan.facts import TIERS, Arena


class RegionLike(Protocol):
    """A region as seen here (``codegen.regions.Region``): its input and output values, the nodes of the graph that it
    runs, all in order, and the key that equal regions share."""

    @property
    def inputs(self) -> tuple[fx.Node, ...]: ...

    @property
    def outputs(self) -> tuple[fx.Node, ...]: ...

    @property
    def own(self) -> tuple[fx.Node, ...]: ...

    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class TierUse:
    """Bytes on one slower tier by node, as in ``Liveness``; ``peak_block_bytes`` with each tensor in a block of the
    host's pool."""

    during: dict[fx.Node, int]
    after: dict[fx.Node, int]
    persistent_bytes: int
    peak_block_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max([self.persistent_bytes, *self.during.values()])


@dataclass(frozen=True)
class FusedRegion:
    """The moment at which a compiled region holds most: bytes on the device then, and the storages that the region has
    read for the last time, and given back, by then."""

    peak_bytes: int
    freed: frozenset[Storage]


@dataclass(frozen=True)
class Liveness:
    """Bytes on the device by node: live while it runs (``during``, outputs and workspace included) and after it
    (``after``).

    ``last_use`` and ``sizes`` are the last reader and the bytes of each storage on the device that a call owns. Of
    ``running_on``, which are there as the step begins, the reader is what settles them, in the next step.
    ``slower`` has the other tiers that the step uses, the faster first. ``compiled`` are the compiled regions: what
    ``after`` says inside one of them holds for its nodes run one by one. ``arena``: the pool that a step's tensors lie
    in, where it has one.
    """

    during: dict[fx.Node, int]
    after: dict[fx.Node, int]
    persistent_bytes: int
    last_use: dict[Storage, fx.Node]
    sizes: dict[Storage, int]
    slower: dict[str, TierUse] = field(default_factory=dict)
    compiled: dict[tuple[fx.Node, ...], FusedRegion] = field(default_factory=dict)
    running_on: tuple[Storage, ...] = ()
    arena: Arena | None = None

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes by tier: the device's, and that of each slower tier in use."""
        return {DEVICE: self.peak_bytes, **{tier: use.peak_bytes for tier, use in self.slower.items()}}

    @property
    def host_block_bytes(self) -> int:
        """Peak bytes of the host's pool: ``host_budget`` limits these."""
        return self.slower["host"].peak_block_bytes if "host" in self.slower else 0

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device: of what is live, or with an arena of what is taken for that."""
        if self.arena is not None:
            return self.persistent_bytes + self.arena.num_bytes
        return self.peak_live_bytes

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes that are live on the device at once."""
        return max([self.persistent_bytes, *self.during.values()])

    @property
    def peak_node(self) -> fx.Node | None:
        """The first node at which the device's peak is reached."""
        return max(self.during, key=self.during.__getitem__, default=None)


def liveness(step: StepGraph, on_cpu: bool, *, compiles_regions: bool = False) -> Liveness:
    """Walk the graph in order.

    ``on_cpu``: whether the step runs on a CPU, where operators keep workspaces, some of them as long as their outputs
    live (``scheduler/cost/cpu/workspace.py``), and reductions receive every other rank's slice into a buffer of its own
    (``zerofx/runtime/comm/gloo.py``) rather than sum inside the collective.
    ``compiles_regions``: whether regions are compiled, whose outputs keep nothing more.
    """
    taken = memories(node for node in step.calls() if not runs_on_host(node)) if on_cpu else {}
    excess = (
        {}
        if compiles_regions
        else {node: entry.excess for node, entry in taken.items() if entry is not None and any(entry.excess)}
    )
    if on_cpu:
        excess |= {node: (_padding(node),) for node in step.calls() if node.target is ops.all_reduce_values}
    last_use, owned = _last_uses(step, excess, calls_kernels=not compiles_regions)
    settled_by = _match_settles(step)
    running_on = [storage for storage, reader in last_use.items() if reader in settled_by]
    last_use |= {storage: settled_by[last_use[storage]] for storage in running_on}
    here = {node: storages for node, storages in owned.items() if tier_of(node) == DEVICE}
    last_here = {storage: reader for storage, reader in last_use.items() if storage[0] in here}
    dying = _storages_by_reader(last_here)
    persistent = _persistent_bytes(step, DEVICE)
    sizes = {(node, index): size for node, storages in here.items() for index, size in storages}
    running_here = tuple(storage for storage in running_on if storage in sizes)
    live, during, after = persistent + sum(sizes[storage] for storage in running_here), {}, {}
    shifts = _shifts_of_loops(step, here, last_use)
    for node in step.calls():
        live += sum(size for _, size in here.get(node, ())) + shifts.get(node, 0)
        inside = taken.get(node)
        during[node] = live + (0 if inside is None else inside.inside) + _scratch_bytes(node)
        live -= sum(sizes[storage] for storage in dying.get(node, ()))
        live += _receive_buffer_bytes(node) if on_cpu else 0
        during[node] = max(during[node], live)
        after[node] = live
    away = any(tier_of(node) != DEVICE for node in step.graph.nodes)
    tiers = [tier for tier in TIERS if tier != DEVICE] if away else []
    slower: dict[str, TierUse] = {
        tier: _tier_use(step, tier, last_use, owned, running_on, settled_by) for tier in tiers
    }
    used = {tier: use for tier, use in slower.items() if use.peak_bytes}
    return Liveness(during, after, persistent, last_here, sizes, used, running_on=running_here)


def _scratch_bytes(node: fx.Node) -> int:
    """Bytes that an update of whole parameters holds while it runs."""
    scratch = node.kwargs["scratch_bytes"] if node.target is ops.update_whole else 0
    assert isinstance(scratch, int)
    return scratch


def _match_settles(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """The node that awaits, in the next step, what each ``run_on`` has let run on."""
    runs_on = {background_work(node): node for node in step.calls() if node.target is ops.run_on}
    settled = (node for node in step.calls() if node.target is ops.settle)
    return {runs_on[what]: node for node in settled if (what := background_work(node)) in runs_on}


def _shifts_of_loops(
    step: StepGraph,
    owned: Mapping[fx.Node, list[tuple[int, int]]],
    last_use: Mapping[Storage, fx.Node],
    size_of: Callable[[int], int] = int,
) -> dict[fx.Node, int]:
    """Bytes that become live where a loop begins and ends, besides those of the round that the graph shows.

    What a round makes for the step's caller, or for the same round of another loop, is there for all rounds in the end;
    what it reads of another loop for the last time was there for all of them in the beginning. Either is most in the
    first round or in the last, which is what is said of all.
    """
    loops = loops_of(step)
    loop_of_node = loop_numbers(loops)
    made_bytes, taken_bytes = [0] * len(loops), [0] * len(loops)
    carried = [{storage_source(after) for _, after in loop.carries} for loop in loops]
    for node, number in loop_of_node.items():
        for index, size in owned.get(node, ()):
            reader = last_use.get((node, index))
            consumer = None if reader is None else loop_of_node.get(reader)
            if consumer == number or ((node, index) in carried[number] and reader is not None):
                continue
            made_bytes[number] += size_of(size)
            if consumer is not None:
                taken_bytes[consumer] += size_of(size)
    shifts = {}
    for loop, there_after, there_before in zip(loops, made_bytes, taken_bytes, strict=True):
        most = max(there_before, there_after)
        shifts[loop.begin] = (loop.num_rounds - 1) * (most - there_before)
        shifts[loop.end] = (loop.num_rounds - 1) * (there_after - most)
    return shifts


def _tier_use(
    step: StepGraph,
    tier: str,
    last_use: Mapping[Storage, fx.Node],
    owned: Mapping[fx.Node, list[tuple[int, int]]],
    running_on: Sequence[Storage],
    settled_by: Mapping[fx.Node, fx.Node],
) -> TierUse:
    """Bytes on a slower tier: what is kept and copied there, without what operators on the host hold inside."""
    left = {settle: _bytes_passing(run_on) if tier == "host" else [] for run_on, settle in settled_by.items()}
    held = {node for node in owned if tier_of(node) == tier and node.target in ops.EVENTS}
    dying = _storages_by_reader({storage: reader for storage, reader in last_use.items() if storage[0] in held})
    persistent = _persistent_bytes(step, tier)
    there = [size for node, i in running_on if node in held for index, size in owned[node] if index == i]
    there += itertools.chain.from_iterable(left.values())
    live, during, after = persistent + sum(there), {}, {}
    blocks = most_blocks = _persistent_bytes(step, tier, size_class) + sum(map(size_class, there))
    stored = {node: sizes for node, sizes in owned.items() if node in held}
    shifts, block_shifts = (_shifts_of_loops(step, stored, last_use, size) for size in (int, size_class))
    for node in step.calls():
        live += shifts.get(node, 0)
        blocks += block_shifts.get(node, 0)
        passing, settled = _host_buffer_bytes(node) if tier == "host" else 0, left.get(node, ())
        if not passing and not settled and node not in held and node not in dying:  # most nodes
            during[node] = after[node] = live
            continue
        taken = [size for _, size in owned.get(node, ())] if node in held else []
        freed = [next(size for i, size in owned[source] if i == index) for source, index in dying.get(node, ())]
        freed += settled
        if passing:
            (taken if passing > 0 else freed).append(abs(passing))
        live += sum(taken)
        blocks += sum(map(size_class, taken))
        during[node] = live
        most_blocks = max(most_blocks, blocks)
        live -= sum(freed)
        blocks -= sum(map(size_class, freed))
        after[node] = live
    return TierUse(during, after, persistent, most_blocks)


def _persistent_bytes(step: StepGraph, tier: str, size_of: Callable[[int], int] = int) -> int:
    here = (n for n in step.placeholders() if placeholder(n).alias_of is None and tier_of(n) == tier)
    stored = (node for node in here if tier == DEVICE or not placeholder(node).is_lent)
    return sum(times_held(step, node) * size_of(storage_bytes(t)) for node in stored for t in tensors_of(node))


def _storages_by_reader(last_use: Mapping[Storage, fx.Node]) -> dict[fx.Node, list[Storage]]:
    by_reader: dict[fx.Node, list[Storage]] = {}
    for storage, reader in last_use.items():
        by_reader.setdefault(reader, []).append(storage)
    return by_reader


@dataclass(frozen=True)
class MemoryEvent:
    """One change of a compiled region's memory: ``num_bytes`` taken (given back, if negative), or input ``freed``.

    ``block``: the number of what is taken among all that the region allocates itself, which a caller can give it the
    memory for; None for what operators allocate. ``output``: the output that lies in it.
    """

    num_bytes: int = 0
    freed: int | None = None
    block: int | None = None
    output: int | None = None


def apply_profiles(
    live: Liveness, step: StepGraph, regions: Sequence[tuple[RegionLike, Sequence[MemoryEvent]]]
) -> Liveness:
    """``live`` with what compiled regions hold inside them in the place of their nodes' own temporaries.

    The most that a region holds is said of the last of its nodes that computes.
    """
    during = dict(live.during)
    before = {second: live.after[first] for first, second in itertools.pairwise(step.calls())}
    compiled = dict(live.compiled)
    for region, events in regions:
        members, freed = set(region.own), dict[Storage, None]()
        current = peak = before.get(region.own[0], live.persistent_bytes)
        num_freed = 0
        for event in events:
            current += event.num_bytes
            if event.freed is not None:
                storage = storage_source(region.inputs[event.freed])
                if live.last_use.get(storage) in members and storage not in freed:
                    freed[storage] = None  # once, though several inputs may be parts of it
                    current -= live.sizes[storage]
            if current > peak:
                peak, num_freed = current, len(freed)
        for node in region.own:
            during[node] = min(live.after[node], peak)
        last = next((node for node in reversed(region.own) if not is_view(node)), region.own[-1])
        during[last] = max(peak, live.after[last])
        compiled[region.own] = FusedRegion(during[last], frozenset(itertools.islice(freed, num_freed)))
    return replace(live, during=during, compiled=compiled)


def _last_uses(
    step: StepGraph, excess: Mapping[fx.Node, tuple[int, ...]], *, calls_kernels: bool
) -> tuple[dict[Storage, fx.Node], dict[fx.Node, list[tuple[int, int]]]]:
    """The last reader of each storage that a call owns (the call itself when nothing reads it), and each call's own
    storages as ``(output index, bytes)``, with the ``excess`` that an output does not show. Where ATen's kernels are
    called, those that put values into a view copy all of the memory that it is a view of."""
    owned: dict[fx.Node, list[tuple[int, int]]] = {}
    last_use: dict[Storage, fx.Node] = {}
    sources: dict[fx.Node, Storage] = {}
    for node in step.graph.nodes:
        if node.op == "output":
            continue
        sources[node] = storage_source(node)
        if node.op == "call_function" and sources[node][0] is node and aliased_input(node) is None:
            sizes = _output_bytes(node, excess.get(node, ()))
            if calls_kernels and facts_of(node.target).kind is OperatorKind.SCATTER:
                base, index = sources[node.all_input_nodes[0]]
                whole = dict(owned.get(base, ())).get(index, storage_bytes(tensors_of(base)[index]))
                sizes = [(0, max(whole, *(size for _, size in sizes)))]
            if sizes:
                owned[node] = sizes
                last_use.update({(node, index): node for index, _ in sizes})
        for arg in node.all_input_nodes:
            # A getitem names one output; its source's other outputs are not read by it.
            storage = sources[node] if node.target is operator.getitem else sources[arg]
            if storage in last_use:
                last_use[storage] = node
    for arg in step.output.all_input_nodes:
        last_use.pop(sources[arg], None)
    return last_use, owned


def _output_bytes(node: fx.Node, excess: Sequence[int]) -> list[tuple[int, int]]:
    result = node.meta.get("val")
    outputs = result if isinstance(result, list | tuple) else (result,)
    sizes = [(index, storage_bytes(out)) for index, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
    if not excess:
        return sizes
    return [(index, size + more) for (index, size), more in zip(sizes, excess, strict=True)]


def _host_buffer_bytes(node: fx.Node) -> int:
    """Bytes that a started copy to or from nvme holds on the host (+), and its wait gives back (-)."""
    if len(hops_of(node)) > 1:  # between the device and nvme: it needs a block on the host on its way
        return storage_bytes(tensors_of(node)[0])
    if node.target is ops.wait and isinstance(node.args[0], fx.Node) and node.args[0].target in ops.TRANSFERS:
        return -_host_buffer_bytes(node.args[0])
    return 0


def _bytes_passing(run_on: fx.Node) -> list[int]:
    """Bytes that each copy which runs on holds on the host on its way to nvme."""
    return [size for copy in run_on.all_input_nodes if (size := _host_buffer_bytes(copy)) > 0]


def _padding(node: fx.Node) -> int:
    """Bytes that a value reduced over ranks point-to-point keeps beyond its own: all ranks' slices are as large."""
    (reduced,), num_ranks = tensors_of(node), node.args[2]
    assert isinstance(num_ranks, int)
    return -reduced.numel() % num_ranks * reduced.itemsize


def _receive_buffer_bytes(node: fx.Node) -> int:
    """Bytes beyond its result that a started point-to-point reduction takes (+), and its wait gives back (-).

    Each other rank's part is received apart, one of them where the result will be if that is not in the buffer.
    """
    if node.target in _RECEIVING:
        num_ranks = node.args[_RECEIVING[node.target]]
        assert isinstance(num_ranks, int)
        num_apart = num_ranks - 1 if node.target is ops.reduce_scatter_into else num_ranks - 2
        return num_apart * storage_bytes(tensors_of(node)[0])
    if node.target is ops.wait and isinstance(node.args[0], fx.Node):
        return -_receive_buffer_bytes(node.args[0]) if node.args[0].target in _RECEIVING else 0
    return 0


# Reductions whose parts are received apart, and where their numbers of ranks stand among their arguments.
_RECEIVING: Mapping[object, int] = MappingProxyType({**dict.fromkeys(ops.REDUCTIONS, 2), ops.reduce_scatter_values: 1})
