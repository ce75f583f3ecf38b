"""Estimates of the memory of a compiled region, made before it is compiled.

Inductor inlines pointwise operators and normalisations into their readers: such a value takes memory only where an
operator with a kernel of its own (a matrix product, attention), or another region, reads it; and it is written over an
operand of the same size that dies there (``scheduler/cost/fusion.py``). Once a region is compiled, its real record
takes the estimate's place (``scheduler.cost.liveness.apply_profiles``), and a plan that it makes too tight is made
again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from zerofx.ir.aliasing import Storage, aliased_input, is_view, mutated_inputs, storage_source, tensors_of
from zerofx.ir.operators.operator import Inductor, OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.analysis.saved_values import storage_size
from zerofx.scheduler.cost.cpu.workspace import inductor_workspace_bytes
from zerofx.scheduler.cost.liveness import MemoryEvent, RegionLike
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import distinct_bytes, node_cost, node_flops


@dataclass(frozen=True)
class Fused:
    """The kernels that a region is taken to run in, in order.

    ``order`` are its operators, ``members`` all of its nodes, ``stored`` the storages that take memory, ``reads`` those
    that are read to compute an operator, through what is inlined into it, ``ancestors`` the operators that it needs.
    """

    kernels: list[list[fx.Node]]
    order: list[fx.Node]
    members: set[fx.Node]
    stored: set[Storage]
    reads: Mapping[fx.Node, set[Storage]]
    ancestors: Mapping[fx.Node, set[fx.Node]]


def fuse(region: RegionLike) -> Fused:
    """Group the nodes of ``region`` that Inductor computes together."""
    order = [node for node in region.own if not is_view(node) and node.target is not operator.getitem]
    members = set(region.own)
    stored = _storages_in_memory(order, members)
    reads = {node: _storages_read(node, members, stored) for node in order}
    needs = {node: {storage[0] for storage in reads[node] if storage[0] in reads} for node in order}
    ancestors = _ancestors(order, needs)
    kernels = _kernels([n for n in _schedule(order, reads, needs, ancestors, stored) if _runs(n, stored)], reads, needs)
    return Fused(kernels, order, members, stored, reads, ancestors)


def estimate_memory(
    region: RegionLike, kernels_in_use: Collection[str], *, on_cpu: bool = True
) -> tuple[MemoryEvent, ...]:
    """Allocations and frees of ``region``, its outputs included, as if it were compiled.

    ``kernels_in_use``: those of zerofx's own, by name, which hold other memory than ATen's. ``on_cpu``: whether the
    step will run on a CPU, whose kernels keep workspaces, wherever it was captured.
    """
    fused = fuse(region)
    order, members, stored, reads, ancestors = fused.order, fused.members, fused.stored, fused.reads, fused.ancestors
    kernels = fused.kernels
    last: dict[Storage, int] = {}
    for number, kernel in enumerate(kernels):
        for node in kernel:
            last.update(dict.fromkeys(reads[node], number))
    leaving = _storages_read_outside(order, members)
    dying: dict[int, list[Storage]] = {}
    for storage, number in last.items():
        dying.setdefault(number, []).append(storage)
    given = {storage_source(value): number for number, value in enumerate(region.inputs)}
    live: dict[Storage, int] = {}
    blocks: dict[Storage, int | None] = {}  # None for what a kernel of ATen's allocates itself
    events: list[MemoryEvent] = []
    for number, kernel in enumerate(kernels):
        free = [s for s in dying.get(number, ()) if s in live and s not in leaving]
        kernel, over = _reuse_buffers(kernel, free, reads, ancestors)
        for node in kernel:
            for storage in (s for s in outputs_of(node) if s in stored):
                size = storage_size(storage)
                taken = next((s for s in free if s in over[node] and live[s] == size), None)
                if taken is None:
                    blocks[storage] = len(blocks) if is_written(node) else None
                    events.append(MemoryEvent(size, block=blocks[storage]))
                else:
                    free.remove(taken)
                    del live[taken]
                    blocks[storage] = blocks[taken]
                live[storage] = size
                if storage not in last and storage not in leaving:
                    free.append(storage)
        aten = [node for node in kernel if not is_loop(node)] if on_cpu else []
        scratch = sum(inductor_workspace_bytes(node, kernels_in_use) for node in aten)
        events += [MemoryEvent(scratch), MemoryEvent(-scratch)] if scratch else []
        events += [MemoryEvent(-live.pop(storage), block=blocks[storage]) for storage in free]
        events += [MemoryEvent(freed=given[storage]) for storage in dying.get(number, ()) if storage in given]
    lying = ((number, blocks.get(storage_source(output))) for number, output in enumerate(region.outputs))
    events += [MemoryEvent(block=block, output=number) for number, block in lying if block is not None]
    return tuple(events)


def _kernels(
    order: Iterable[fx.Node], reads: Mapping[fx.Node, set[Storage]], needs: Mapping[fx.Node, set[fx.Node]]
) -> list[list[fx.Node]]:
    """``order`` in kernels: loops that stand in a row, run over as many elements and read the same, or each other."""
    kernels: list[list[fx.Node]] = []
    for node in order:
        before = kernels[-1] if kernels else []
        alike = [n for n in before if is_loop(n) and _extent(n, reads) == _extent(node, reads)]
        if is_loop(node) and any(other in needs[node] or reads[node] & reads[other] for other in alike):
            before.append(node)
        else:
            kernels.append([node])
    return kernels


def _extent(node: fx.Node, reads: Mapping[fx.Node, set[Storage]]) -> int:
    """Elements that a loop runs over, in bytes."""
    storages = reads[node] if _is_reduction(node) else outputs_of(node)
    return max(map(storage_size, storages), default=0)


def _reuse_buffers(
    kernel: list[fx.Node],
    dying: Sequence[Storage],
    reads: Mapping[fx.Node, set[Storage]],
    ancestors: Mapping[fx.Node, set[fx.Node]],
) -> tuple[list[fx.Node], dict[fx.Node, set[Storage]]]:
    """The order of a kernel's loops, and which storages, of those that die there, each is written over if it fits.

    Without reductions that is what ``codegen/inductor/kernel_passes.py`` has Inductor do, else what it does by itself:
    a loop overwrites what it reads, and nothing else in its kernel but what it needs.
    """
    if all(is_inlined(node) and facts_of(node.target).inductor is Inductor.LOOP for node in kernel):
        sizes = {node: {storage_size(storage) for storage in outputs_of(node)} for node in kernel}
        fitting = {s for s in dying if all(storage_size(s) in sizes[node] for node in kernel if s in reads[node])}
        ends = {node: reads[node] & fitting for node in kernel}
        order = order_for_reuse(kernel, ends, ancestors)
        last = find_last_reads(order, ends)
        return order, {node: last.get(node, set()) for node in kernel}
    over: dict[fx.Node, set[Storage]] = {}
    for node in kernel:
        others = [other for other in kernel if other is not node and other not in ancestors[node]]
        alone = is_inlined(node) and facts_of(node.target).inductor is not Inductor.ROW_LOOPS
        over[node] = {s for s in reads[node] if not any(s in reads[other] for other in others)} if alone else set()
    return kernel, over


def _schedule(
    order: Sequence[fx.Node],
    reads: Mapping[fx.Node, set[Storage]],
    needs: Mapping[fx.Node, set[fx.Node]],
    ancestors: Mapping[fx.Node, set[fx.Node]],
    stored: set[Storage],
) -> list[fx.Node]:
    """``order`` with loops over the same elements of the same value in one place, as Inductor fuses them: what the
    later of two needs is then computed before the earlier."""
    together: list[fx.Node] = []
    placed: set[fx.Node] = set()
    rank = {node: number for number, node in enumerate(order)}

    def place(node: fx.Node) -> None:
        for source in sorted(needs[node] - placed, key=rank.__getitem__):
            place(source)
        if node not in placed:
            placed.add(node)
            together.append(node)

    alike: dict[Storage, list[fx.Node]] = {}  # loops over the elements of a value that they read
    shared: dict[fx.Node, list[Storage]] = {}
    for node in order:
        if is_inlined(node) and _runs(node, stored):
            shared[node] = [s for s in reads[node] if storage_size(s) == _extent(node, reads)]
            for storage in shared[node]:
                alike.setdefault(storage, []).append(node)
    for node in order:
        if node in placed:
            continue
        group, met = {node: None}, {node}
        pending = [node]
        while pending:
            for storage in shared.get(pending.pop(), ()):
                for other in alike[storage]:
                    if other not in met and other not in placed:
                        met.add(other)
                        if rank[other] > rank[node] and ancestors[other].isdisjoint(group):
                            group[other] = None
                            pending.append(other)
        for entry in group:
            for source in sorted(needs[entry] - placed, key=rank.__getitem__):
                place(source)
        for element in sorted(group, key=rank.__getitem__):
            place(element)
    return together


def _ancestors(order: Iterable[fx.Node], needs: Mapping[fx.Node, set[fx.Node]]) -> dict[fx.Node, set[fx.Node]]:
    """All nodes that each node depends on, directly or not."""
    ancestors: dict[fx.Node, set[fx.Node]] = {}
    for node in order:
        ancestors[node] = set(needs[node]).union(*(ancestors[source] for source in needs[node]))
    return ancestors


def _storages_in_memory(order: Iterable[fx.Node], members: set[fx.Node]) -> set[Storage]:
    """The storages that take memory."""
    nodes = list(order)
    stored = {s for node in nodes if not is_inlined(node) and aliased_input(node) is None for s in outputs_of(node)}
    stored |= _storages_read_outside(nodes, members)
    for node in nodes:
        if not is_loop(node):
            stored.update(storage_source(source) for source in node.all_input_nodes if source in members)
    return stored


def _storages_read_outside(order: Iterable[fx.Node], members: set[fx.Node]) -> set[Storage]:
    """The storages that are read outside the region, through views or not."""
    leaving = set()
    for node in order:
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user not in members and not is_view(user):
                leaving |= {s for source in user.all_input_nodes if (s := storage_source(source))[0] is node}
            elif is_view(user) or user.target is operator.getitem:
                pending.extend(user.users)
    return leaving


def _runs(node: fx.Node, stored: set[Storage]) -> bool:
    return not is_inlined(node) or any(storage in stored for storage in outputs_of(node))


def _storages_read(node: fx.Node, members: set[fx.Node], stored: set[Storage]) -> set[Storage]:
    """The storages in memory that are read to compute ``node``, through ``members`` that are inlined into it."""
    storages: set[Storage] = set()
    seen: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        storage = storage_source(source)
        owner = storage[0]
        if storage in stored or owner not in members or not is_inlined(owner):
            storages.add(storage)
        elif owner not in seen:
            seen.add(owner)
            pending.extend(owner.all_input_nodes)
    return storages


def is_inlined(node: fx.Node) -> bool:
    """True if loops that read ``node`` compute it themselves."""
    return facts_of(node.target).is_loop and not mutated_inputs(node)


def _is_reduction(node: fx.Node) -> bool:
    return facts_of(node.target).inductor is Inductor.REDUCTION


def is_loop(node: fx.Node) -> bool:
    """True if Inductor generates the kernel that computes ``node``."""
    return is_inlined(node) or _is_reduction(node)


def is_written(node: fx.Node) -> bool:
    """True if Inductor allocates the output of ``node``, and a kernel writes it there."""
    return is_loop(node) or facts_of(node.target).kind is OperatorKind.PRODUCT


def outputs_of(node: fx.Node) -> list[Storage]:
    """The storages that ``node`` makes, those of a loop as far as they are used."""
    if aliased_input(node) is not None:
        return []
    result = node.meta.get("val")
    if isinstance(result, torch.Tensor):
        return [(node, 0)]
    if not isinstance(result, list | tuple):
        return []
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    indices = [i for i, output in enumerate(result) if isinstance(output, torch.Tensor)]
    return [(node, i) for i in indices if i in used or not is_inlined(node)]


def kernel_seconds(region: RegionLike, machine: Machine) -> float:
    """Seconds that the kernels of a compiled region take on a GPU: each a roofline of its traffic with memory.

    Loops that Inductor fuses read what is outside their kernel once, and write what is read outside it; what is inlined
    into its readers moves nothing. All else takes what it takes alone (``roofline.py``).

    Not covered: a kernel that moves less than the device's bandwidth, because it has few elements or reads them out of
    order. On CPUs loops are bound by their arithmetic, which this would leave out.
    """
    fused = fuse(region)
    return sum(_seconds(kernel, fused, machine) for kernel in fused.kernels)


def _seconds(kernel: list[fx.Node], fused: Fused, machine: Machine) -> float:
    if len(kernel) == 1 and not is_loop(kernel[0]):
        return node_cost(kernel[0], machine).seconds
    read, computed = _kernel_reads(kernel, fused)
    own = set(kernel)
    num_bytes = sum(size for storage, size in read.items() if storage[0] not in own)
    num_bytes += sum(storage_size(s) for node in kernel for s in outputs_of(node) if s in fused.stored)
    dtype = tensors_of(kernel[-1])[0].dtype
    arithmetic = sum(map(node_flops, computed)) / machine.vector_flops(dtype)
    return max(arithmetic, num_bytes / machine.memory_bandwidth) + machine.device.launch_latency


def _kernel_reads(kernel: Iterable[fx.Node], fused: Fused) -> tuple[dict[Storage, int], set[fx.Node]]:
    """Bytes of each storage in memory that a kernel reads, and all that it computes, what is inlined included."""
    read: dict[Storage, int] = {}
    pending = list(kernel)
    computed = set(pending)
    while pending:
        for source in pending.pop().all_input_nodes:
            storage = storage_source(source)
            owner = storage[0]
            if storage in fused.stored or owner not in fused.members or not is_inlined(owner):
                size = sum(map(distinct_bytes, tensors_of(source)))
                read[storage] = max(read.get(storage, 0), min(size, storage_size(storage)))
            elif owner not in computed:
                computed.add(owner)
                pending.append(owner)
    return read, computed


Loop = TypeVar("Loop")
Value = TypeVar("Value")


def order_for_reuse(
    loops: Sequence[Loop], ends: Mapping[Loop, AbstractSet[Value]], needs: Mapping[Loop, AbstractSet[Loop]]
) -> list[Loop]:
    """An order of the loops of one kernel in which many are the last to read a value, which they can be written over.

    From the last on, the loop comes that reads the fewest values which no later one reads, but one at least. Where that
    is no better than the order as it is, that stays.

    Args:
        ends: the values of the size of its result that a loop reads, and that nothing reads after the kernel.
        needs: the loops whose results a loop needs, directly or not; others than the kernel's may be among them.
    """
    rest, order, claimed = list(loops), list[Loop](), set[Value]()
    while rest:
        free = [entry for entry in rest if not any(entry in needs[other] for other in rest)]
        numbers = {element: len(ends[element] - claimed) for element in free}
        taken = min(reversed(free), key=lambda loop: (not numbers[loop], numbers[loop]))
        rest.remove(taken)
        order.insert(0, taken)
        claimed |= ends[taken]
    return order if len(find_last_reads(order, ends)) > len(find_last_reads(loops, ends)) else list(loops)


def find_last_reads(order: Sequence[Loop], ends: Mapping[Loop, AbstractSet[Value]]) -> dict[Loop, set[Value]]:
    """The values that each loop, in this order, is the last to read, for the loops that have some."""
    last_reads, later = dict[Loop, set[Value]](), set[Value]()
    for loop in reversed(order):
        if last := ends[loop] - later:
            last_reads[loop] = set(last)
        later |= ends[loop]
    return last_reads
