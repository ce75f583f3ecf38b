"""What a compiled region will hold, estimated before it is compiled.

Inductor inlines pointwise operators and normalisations into their readers: such a value takes memory only where an
operator with a kernel of its own (a matrix product, attention), or another region, reads it; and it is written over an
operand of the same size that dies there. Once a region is compiled, its real record takes the estimate's place
(``scheduler.liveness.with_profiles``), and a plan that was made too tight by it is made again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from zerofx.scheduler.crossing import storage_size
from zerofx.scheduler.liveness import MemoryEvent, RegionLike
from zerofx.scheduler.storage import Storage, aliased_input, is_view, mutated_inputs, storage_source
from zerofx.scheduler.workspace import is_left_to_aten, workspace_bytes

# Operators that Inductor decomposes into loops over their elements, beside those that are tagged pointwise.
_INLINED = frozenset({
    "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax", "aten::_softmax_backward_data",
    "aten::_to_copy", "aten::cat", "aten::clone", "aten::full", "aten::full_like", "aten::native_layer_norm",
    "aten::native_layer_norm_backward", "aten::nll_loss_backward", "aten::zeros", "aten::zeros_like",
    "aten::select_backward", "aten::slice_backward", "aten::stack", "aten::_fused_rms_norm", "aten::embedding",
    "aten::native_dropout", "aten::native_dropout_backward", "aten::threshold_backward",
})  # fmt: skip


def estimated_memory(region: RegionLike) -> tuple[MemoryEvent, ...]:
    """What ``region`` takes and gives back on its way, its outputs included, as if it were compiled."""
    order = [node for node in region.own if not is_view(node) and node.target is not operator.getitem]
    kept = _stored(order, set(region.own))
    reads = {node: _read(node, kept) for node in order}
    order = _together(order, reads, kept)
    last: dict[Storage, fx.Node] = {}
    for node in order:
        if _runs(node, kept):
            last.update(dict.fromkeys(reads[node], node))
    leaving = _leaving(order, set(region.own))
    dying: dict[fx.Node, list[Storage]] = {}
    for storage, node in last.items():
        dying.setdefault(node, []).append(storage)
    given = {storage_source(value): number for number, value in enumerate(region.inputs)}
    live: dict[Storage, int] = {}
    events: list[MemoryEvent] = []
    for node in order:
        if not _runs(node, kept):
            continue
        free = [s for s in dying.get(node, ()) if s in live and s not in leaving]
        for storage in (s for s in _outputs(node) if s in kept):
            size = storage_size(storage)
            taken = next((s for s in free if live[s] == size and _is_in_place(node)), None)
            if taken is None:
                events.append(MemoryEvent(size))
            else:
                free.remove(taken)
                del live[taken]
            live[storage] = size
            if storage not in last and storage not in leaving:
                free.append(storage)
        scratch = workspace_bytes(node) if is_left_to_aten(node) else 0
        events += [MemoryEvent(scratch), MemoryEvent(-scratch)] if scratch else []
        events += [MemoryEvent(-live.pop(storage)) for storage in free]
        events += [MemoryEvent(freed=given[storage]) for storage in dying.get(node, ()) if storage in given]
    return tuple(events)


def _together(order: Sequence[fx.Node], reads: Mapping[fx.Node, set[Storage]], kept: set[Storage]) -> list[fx.Node]:
    """``order`` with loops over the same elements of the same value in one place, as Inductor fuses them: what the
    later of two needs is then computed before the earlier."""
    found: list[fx.Node] = []
    placed: set[fx.Node] = set()
    needs = {node: {storage[0] for storage in reads[node]} for node in order}

    def place(node: fx.Node) -> None:
        for source in sorted(needs[node] - placed, key=rank.__getitem__):
            place(source)
        if node not in placed:
            placed.add(node)
            found.append(node)

    rank = {node: number for number, node in enumerate(order)}
    needs = {node: {source for source in sources if source in rank} for node, sources in needs.items()}
    loops = [node for node in order if _is_inlined(node) and _runs(node, kept)]
    for node in order:
        if node in placed:
            continue
        partner = next((other for other in loops if rank[other] > rank[node] and _share(node, other, reads)), None)
        if partner is None or node not in loops or partner in placed or _needs(partner, node, needs):
            place(node)
        else:
            for source in sorted(needs[partner], key=rank.__getitem__):
                place(source)
            place(node)
            place(partner)
    return found


def _share(one: fx.Node, other: fx.Node, reads: Mapping[fx.Node, set[Storage]]) -> bool:
    size = max(map(storage_size, _outputs(one)), default=0)
    common = reads[one] & reads[other]
    return (
        any(storage_size(storage) == size for storage in common)
        and max(map(storage_size, _outputs(other)), default=0) == size
    )


def _needs(node: fx.Node, other: fx.Node, needs: Mapping[fx.Node, set[fx.Node]]) -> bool:
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current is other:
            return True
        pending.extend(needs[current] - seen)
        seen |= needs[current]
    return False


def _stored(order: Iterable[fx.Node], members: set[fx.Node]) -> set[Storage]:
    """The storages that take memory."""
    nodes = list(order)
    found = {s for node in nodes if not _is_inlined(node) and aliased_input(node) is None for s in _outputs(node)}
    found |= _leaving(nodes, members)
    for node in nodes:
        if not _is_inlined(node):
            found.update(storage_source(source) for source in node.all_input_nodes if source in members)
    return found


def _leaving(order: Iterable[fx.Node], members: set[fx.Node]) -> set[Storage]:
    """The storages that are read outside the region, through views or not."""
    found = set()
    for node in order:
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user not in members and not is_view(user):
                found |= {s for source in user.all_input_nodes if (s := storage_source(source))[0] is node}
            elif is_view(user) or user.target is operator.getitem:
                pending.extend(user.users)
    return found


def _runs(node: fx.Node, kept: set[Storage]) -> bool:
    return not _is_inlined(node) or any(storage in kept for storage in _outputs(node))


def _read(node: fx.Node, kept: set[Storage]) -> set[Storage]:
    """The storages in memory that are read to compute ``node``, through operators that are inlined into it."""
    found: set[Storage] = set()
    seen: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        storage = storage_source(source)
        owner = storage[0]
        if storage in kept or owner.op != "call_function" or not _is_inlined(owner):
            found.add(storage)
        elif owner not in seen:
            seen.add(owner)
            pending.extend(owner.all_input_nodes)
    return found


def _is_inlined(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or mutated_inputs(node):
        return False
    return torch.Tag.pointwise in target.tags or target._schema.name in _INLINED


def _is_in_place(node: fx.Node) -> bool:
    """Whether a dying operand may be written over: not by a normalisation's gradients, which are several loops."""
    return _is_inlined(node) and "layer_norm_backward" not in str(node.target)


def _outputs(node: fx.Node) -> list[Storage]:
    if aliased_input(node) is not None:
        return []
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return [(node, 0)]
    if not isinstance(found, list | tuple):
        return []
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    made = [i for i, output in enumerate(found) if isinstance(output, torch.Tensor)]
    return [(node, i) for i in made if i in used or not _is_inlined(node)]
