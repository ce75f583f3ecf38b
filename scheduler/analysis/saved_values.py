"""Saved activations: values that forward makes and backward reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, is_view, storage_bytes, storage_source
from zerofx.ir.facts import Phase, draws_for_nothing, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.table import facts_of
from zerofx.ir.ops import VALUE_COLLECTIVES

aten = torch.ops.aten


def saved_storages(step: StepGraph) -> dict[Storage, None]:
    """Storages that forward makes and backward reads, in the order in which they are made."""
    order = step.positions()
    read = dict.fromkeys(
        storage_source(source)
        for node in step.calls()
        if origin(node).phase is Phase.BACKWARD
        for source in node.all_input_nodes
        if is_forward_call(source)
    )
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


def is_read_exactly(value: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """True if backward reads a value, or its sums and products, where a small error makes a large one in a gradient.

    ``known`` remembers what it has come to.
    """
    if value not in known:
        known[value] = False
        readers = [user for user in value.users if is_view(user) or origin(user).phase is Phase.BACKWARD]
        known[value] = any(
            any(reader.args[place : place + 1] == (value,) for place in facts_of(reader.target).reads_exactly)
            or (reader.target is aten.pow.Tensor_Scalar and reader.args[1] < 1)  # type: ignore[operator]  # a number
            or ((is_view(reader) or _has_errors_of_inputs(reader)) and is_read_exactly(reader, known))
            for reader in readers
        )
    return known[value]


def _has_errors_of_inputs(node: fx.Node) -> bool:
    return node.target in (
        aten._to_copy.default, aten.clone.default, aten.neg.default, aten.add.Tensor, aten.sub.Tensor,
        aten.rsub.Scalar, aten.mul.Tensor,
    )  # fmt: skip


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
