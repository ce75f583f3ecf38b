"""Storages of nodes' outputs, from operators' schemas. Live bytes are counted by storage.

An fx graph names *values*; memory is held by *storages*. Three facts tie the two together, and all three are read from
the operator's schema, never from its name:

- a return annotated ``Tensor(a)`` shares the storage of the argument annotated ``a`` (a view);
- a return annotated ``Tensor(a!)`` *is* that argument (an in-place or out= operator), which the node mutates;
- every other return has its own storage.

A few operators share storage without saying so, or say so and still copy when strides do not permit a view: the table
of operators lists them (``zerofx/ir/operators/movement.py``). Nodes carry fake or meta tensors in ``node.meta["val"]``;
nothing here reads their data.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.operators.operator import View
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.operators import Argument, OpOverload, schema_of

# A node and the number of its output: what owns the memory that values are views of.
Storage = tuple[fx.Node, int]


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """The tensors a node yields, in output order; empty for a node without ``meta["val"]`` or without tensors.

    Missing outputs (``None``, as in a convolution's backward without bias) and plain or symbolic numbers are left out.
    """
    return tuple(tensors_in(node.meta.get("val")))


def storage_bytes(val: Tensor) -> int:
    """Bytes from the first to the last element that ``val`` addresses: the least storage that can hold it.

    ``(1 + sum((size - 1) * stride)) * itemsize``, zero for an empty tensor. Exact for a tensor that owns its storage;
    for a view it is the extent of the view, not of its base.
    """
    shape = val.shape
    if 0 in shape:
        return 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(shape, val.stride(), strict=True))
    return (1 + last) * val.element_size()


def node_bytes(node: fx.Node) -> int:
    """Bytes of all the tensors that a node yields, each as ``storage_bytes`` counts it."""
    return sum(map(storage_bytes, tensors_of(node)))


def is_view(node: fx.Node) -> bool:
    """True if the node yields only storage that existed before it, and writes nothing: it costs neither bytes nor time.

    True for views, for ``getitem`` (which names one output of its source) and for in-place changes of shape only
    (``squeeze_``). False for in-place and out= operators, and for a reshape that has to copy.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    sharing = _alias_info(node.target)
    if not (sharing.shares or sharing.is_inplace_view) or not tensors_of(node):
        return False
    if sharing.is_inplace_view:
        return True
    return _alias_of(node, sharing) is not None and not (sharing.writes and mutated_inputs(node))


def aliased_input(node: fx.Node) -> fx.Node | None:
    """The input node whose storage the output of ``node`` shares, or None when it has storage of its own.

    One step only: follow it until None to reach the owner. ``getitem`` of a view that returns a list (``split``,
    ``unbind``) gives the *base* of that view; ``getitem`` of an ordinary operator with several outputs gives None,
    because output i is a storage of its own that ``getitem`` merely names (see ``storage_source``). For an operator
    with several outputs of which only some share an input's storage, ask the ``getitem`` nodes, not the operator.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, index = node.args
        return _aliased_output(source, index) if isinstance(source, fx.Node) and isinstance(index, int) else None
    return _alias_of(node, _alias_info(node.target)) if isinstance(node.target, OpOverload) else None


def _alias_of(node: fx.Node, sharing: _AliasInfo) -> fx.Node | None:
    """``aliased_input`` of an operator's call."""
    if not sharing.shares:
        return None
    if sharing.base is not None and sharing.base < len(args := node.args):
        base = args[sharing.base]
        return base if isinstance(base, fx.Node) else None
    aliased = {_aliased_output(node, i) for i in range(sharing.num_returns)}
    return aliased.pop() if len(aliased) == 1 else None


def storage_source(node: fx.Node) -> Storage:
    """The node that made the storage that ``node``'s output lives in, and which of that node's outputs it is.

    For a node with several outputs of its own, index 0. Two values share storage if and only if this is equal.
    """
    index = 0
    while True:
        base = aliased_input(node)
        if base is not None:
            node, index = base, 0
        elif node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            # Nested lists do not occur in schemas, so an ordinary getitem is the last step.
            return node.args[0], node.args[1] if isinstance(node.args[1], int) else 0
        else:
            return node, index


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The input nodes that ``node`` writes to (schema ``a!``), lists flattened, each once, in schema order."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not _alias_info(node.target).writes:
        return ()
    written: dict[fx.Node, None] = {}
    for argument, value in bound_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.update(dict.fromkeys(_nodes(value)))
    return tuple(written)


@dataclass(frozen=True)
class _AliasInfo:
    """Aliasing facts of an operator's schema, cached, as hashing an operator costs more than using them.

    ``shares``: whether any output may share an input's storage. ``base``: which argument's storage the only output
    always shares; None where a call has to be looked at. ``writes``: whether it writes to any input.
    """

    shares: bool
    base: int | None
    writes: bool
    is_inplace_view: bool
    num_returns: int


@functools.cache
def _alias_info(target: OpOverload) -> _AliasInfo:
    schema = schema_of(target)
    return _AliasInfo(
        shares=facts_of(target).view is View.ALWAYS or any(r.alias_info is not None for r in schema.returns),
        base=_position_of_base(target),
        writes=any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments),
        is_inplace_view=torch.Tag.inplace_view in target.tags,
        num_returns=len(schema.returns),
    )


def _position_of_base(target: OpOverload) -> int | None:
    """Position of the argument whose storage the only output always shares; None where it depends on the call."""
    schema = schema_of(target)
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    if returned is None or facts_of(target).view is not None:
        return None
    shared = (
        position
        for position, argument in enumerate(schema.arguments)
        if not argument.kwarg_only and argument.alias_info is not None and _matches(argument.alias_info, returned)
    )
    return next(shared, None)


def _aliased_output(node: fx.Node, index: int) -> fx.Node | None:
    """The input node whose storage output ``index`` of operator ``node`` shares."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    view = facts_of(node.target).view
    if view is View.ALWAYS:
        return next(_nodes(node.args[0]), None)
    returns = schema_of(node.target).returns
    # A list of tensors is one return of the schema, and all of its items carry the same annotation.
    alias = returns[index if len(returns) > 1 else 0].alias_info if returns else None
    if alias is None:
        return None
    for argument, value in bound_arguments(node):
        if argument.alias_info is not None and _matches(argument.alias_info, alias):
            base = next(_nodes(value), None)
            return base if base is not None and _is_shared(view, base, node) else None
    return None


def _matches(argument: Any, returned: Any) -> bool:
    """True if an argument's annotation names the same memory as a return's.

    A list of views, ``split(Tensor(a -> *) self) -> Tensor(a)[]``, keeps its names on the items, where Python cannot
    see them; the argument is then the one whose memory goes into a list (``*``).
    """
    if returned.before_set:
        return bool(set(argument.before_set) & set(returned.before_set))
    return "*" in argument.after_set


def _is_shared(view: View | None, base: fx.Node, node: fx.Node) -> bool:
    """True if an operator whose schema says "view" returns one for these shapes and strides."""
    if view is None:
        return True
    before, after = tensors_of(base)[0], tensors_of(node)[0]
    if view is View.WHERE_ALIKE:
        wants_copy = any(argument.name == "copy" and value is True for argument, value in bound_arguments(node))
        same_kind = before.dtype == after.dtype and before.device == after.device
        return same_kind and not wants_copy and before.stride() == after.stride()
    # PyTorch's own rule, asked of a meta tensor: a view that the strides do not permit raises.
    probe = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device="meta")
    try:
        probe.view(after.shape)
    except RuntimeError:
        return math.prod(after.shape) == 0
    return True


def bound_arguments(node: fx.Node) -> Iterator[tuple[Argument, object]]:
    """The schema's arguments with the values given for them; arguments left at their default are skipped."""
    assert isinstance(node.target, OpOverload), node
    for i, argument in enumerate(schema_of(node.target).arguments):
        if i < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors among a value and what lists and tuples in it hold, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
