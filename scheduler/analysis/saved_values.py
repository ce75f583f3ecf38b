"""Saved activations: values that forward makes and backward reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, storage_bytes, storage_source
from zerofx.ir.facts import Phase, draws_for_nothing, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.ops import VALUE_COLLECTIVES


def saved_storages(step: StepGraph) -> dict[Storage, None]:
    """Storages that forward makes and backward reads, in the order in which they are made."""
    order = step.positions()
    read = {
        storage_source(source)
        for node in step.calls()
        if origin(node).phase is Phase.BACKWARD
        for source in node.all_input_nodes
        if is_forward_call(source)
    }
    computed = [s for s in read if is_forward_call(s[0])]
    return dict.fromkeys(sorted(computed, key=lambda s: (order[s[0]], s[1])))


def saved_values(step: StepGraph) -> list[fx.Node]:
    """The nodes that name the crossing storages: an operator, the getitem of one of its outputs, or a wait."""
    return [value_node(storage) for storage in saved_storages(step)]


def value_node(storage: Storage) -> fx.Node:
    """The node that names a storage: of what a collective gives the wait, before which it is not there."""
    node, index = storage
    if node.target in VALUE_COLLECTIVES or node.target is ops.receive_value:
        return next(user for user in node.users if user.target is ops.wait)
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    return next(user for user in node.users if user.args[1] == index)


def is_forward_call(node: fx.Node) -> bool:
    """True if the node computes in forward."""
    computes = node.op == "call_function" and node.target not in ops.AROUND_MICRO_BATCHES
    return computes and origin(node).phase is Phase.FORWARD and not draws_for_nothing(node)


def outputs_of(node: fx.Node) -> Iterator[Storage]:
    """The storages of a node that has no storage of another: its result, or those of its outputs that are read."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield (node, 0)
    else:
        yield from ((node, int(user.args[1])) for user in node.users if isinstance(user.args[1], int))


def storage_size(storage: Storage) -> int:
    """Bytes of a storage."""
    node, index = storage
    fake = node.meta["val"]
    return storage_bytes(fake if isinstance(fake, torch.Tensor) else fake[index])
