"""Rewrites of graphs: their protocol, and the edits that they share (calls, readers of nodes, copies of views, ends of
units)."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input, is_view
from zerofx.ir.facts import (
    Origin,
    Phase,
    Placeholder,
    Role,
    is_random,
    origin,
    piece_of,
    set_origin,
    set_placeholder,
    set_value,
    slice_of,
    tensor,
    value,
)
from zerofx.ir.graph import StepGraph
from zerofx.torch_private.operators import OpOverload, schema_of

P = ParamSpec("P")


class Rewrite(Protocol[P]):
    """A frozen dataclass whose fields are its options. ``run`` edits in place what it is given first.

    ``name`` is what texts call it. A rewrite gets a valid graph and leaves a valid one.
    """

    @property
    def name(self) -> str: ...

    def run(self, *args: P.args, **kwargs: P.kwargs) -> None: ...


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    where: Origin,
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    fake: Any = None,
) -> fx.Node:
    """Create a call at the graph's insertion point.

    Its fake value is ``fake``, or else what ``target`` gives for the fake values of its arguments: for an operator that
    hands on what it is given, that very value. An operator without a result, such as a fused update, is not called: it
    may have no fake implementation, and check the hyperparameters.
    """
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    has_result = not isinstance(target, OpOverload) or bool(schema_of(target).returns)
    if fake is None and has_result:
        fake = _same_value(target, args)
    if fake is None and has_result:
        fake_args, fake_kwargs = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        fake = target(*fake_args, **fake_kwargs)
    set_value(node, fake)
    return set_origin(node, where)


def _same_value(target: Any, args: tuple[Any, ...]) -> Any:
    """The fake value of an argument that the call's result is, or is laid out as; None for any other operator."""
    if target is operator.getitem:
        source, index = args
        return value(source)[index]
    first = args[0] if args else None
    if not isinstance(first, fx.Node) or not isinstance(target, OpOverload):
        return None
    returns = schema_of(target).returns
    written = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    if written and torch.Tag.inplace_view in target.tags:
        return None
    is_first = written and schema_of(target).arguments[0].alias_info is not None
    return value(first) if is_first or target in (ops.wait, ops.offload, ops.reload) else None


def insert_parameter(step: StepGraph, before: fx.Node, name: str, fake: torch.Tensor) -> fx.Node:
    """A placeholder for the parameter ``name``, which ``fake`` is like, in front of another placeholder."""
    with step.graph.inserting_before(before):
        node = step.graph.placeholder(re.sub(r"\W+", "_", name).strip("_"))
    set_value(node, fake)
    return set_placeholder(node, Placeholder(Role.PARAMETER, name))


def consumers(root: fx.Node) -> list[fx.Node]:
    """All nodes that read ``root``'s storage, itself or through views; the views themselves are not listed."""
    users: dict[fx.Node, None] = {}
    pending = deque((user, root) for user in root.users)
    while pending:
        user, source = pending.popleft()
        # A wait reads the buffer that a copy was made from, and hands on the copy.
        if is_view(user) and (user.target is operator.getitem or aliased_input(user) is source):
            pending.extend((further, user) for further in user.users)
        else:
            users[user] = None
    return list(users)


def runs_once(node: fx.Node) -> bool:
    """True for what cannot be done again: draws, and messages between stages."""
    return is_random(node) or node.target in ops.MESSAGES


def ends_send(node: fx.Node) -> bool:
    """True for the wait for what is sent to another stage, whose result nothing reads."""
    started = node.args[0] if node.target is ops.wait else None
    return isinstance(started, fx.Node) and started.target is ops.send_value


def erase_unread(graph: fx.Graph) -> None:
    """Erase calls that nothing reads and that do nothing else, as ``Graph.eliminate_dead_code`` does.

    That asks of every node whether it does anything else, where most are read, and checks the whole graph before.
    """
    for node in reversed(graph.nodes):
        if not node.users and node.target not in ops.AROUND_MICRO_BATCHES and not (node.is_impure() or ends_send(node)):
            graph.erase_node(node)


def node_named(by_name: Mapping[str, fx.Node], name: str) -> fx.Node:
    """The node of the captured graph that a plan names, in ``StepGraph.nodes_by_name``.

    Raises:
        PlanError: the graph has none.
    """
    if name not in by_name:
        raise PlanError(f"the plan names node {name}, which this graph has not; make the plan again for this model")
    return by_name[name]


def is_view_of(node: fx.Node, root: fx.Node) -> bool:
    """True if ``node`` is ``root`` or a view of it; views have one tensor input."""
    while node is not root and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is root


def view_again(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], where: Origin | None = None) -> fx.Node:
    """``node``, a view of a key of ``copies``, as the same view of that key's value, made at the insertion point.

    ``copies`` remembers it. ``where``: its origin, that of ``node`` if None.
    """
    if node not in copies:
        base = view_again(graph, node.all_input_nodes[0], copies, where)
        again = graph.node_copy(node, lambda n: base if n is node.all_input_nodes[0] else n)
        set_value(again, value(node))
        copies[node] = set_origin(again, where or origin(node))
    return copies[node]


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, where: Origin) -> fx.Node:
    """``node`` in ``dtype``: itself, or converted at the insertion point."""
    if tensor(node).dtype == dtype:
        return node
    return insert_call(graph, torch.ops.aten._to_copy.default, (node,), where, {"dtype": dtype})


def read_instead(reader: fx.Node, whole: fx.Node, copies: dict[fx.Node, fx.Node], where: Origin | None = None) -> None:
    """Make ``reader`` read ``copies``' value instead of ``whole``, and the same views of it (``view_again``)."""
    for source in list(reader.all_input_nodes):
        if is_view_of(source, whole):
            with reader.graph.inserting_before(reader):
                reader.replace_input_with(source, view_again(reader.graph, source, copies, where))


def skip_getitems(node: fx.Node) -> fx.Node:
    """The node after which a successor of ``node`` can be inserted: past the getitems that name its outputs."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def skip_releases(node: fx.Node) -> fx.Node:
    """The node after which an update at ``node`` goes: past the releases and reductions that follow it, as a release
    frees memory, and a reduction overlaps with the update."""
    while node.next.target in (ops.release, *ops.REDUCTIONS):
        node = node.next
    return node


def start_of_unit(step: StepGraph, node: fx.Node, *, by_piece: bool = False) -> fx.Node:
    """The node before which an event for ``node``'s unit is put so that it does not cut the unit's run in two.

    ``by_piece``: also where a piece begins at whose borders regions do not end.
    """
    run, key = node, _RunKey.from_node(step, node, by_piece)
    while _continues(step, run.prev, key, by_piece):
        run = run.prev
    return run


def end_of_unit(step: StepGraph, node: fx.Node, *, by_piece: bool = False) -> fx.Node:
    """The node after which an event for ``node``'s unit is put so that it does not cut the unit's run in two.

    ``by_piece``: also where a piece ends at whose borders regions do not end.
    """
    run, key = node, _RunKey.from_node(step, node, by_piece)
    while _continues(step, run.next, key, by_piece):
        run = run.next
    return run


class _RunKey(NamedTuple):
    """Facts that nodes of one run share: phase, unit, slice of a weight, and piece."""

    phase: Phase
    unit: str
    slice: str | None
    piece: str | None

    @staticmethod
    def from_node(step: StepGraph, node: fx.Node, by_piece: bool) -> _RunKey:
        piece = piece_of(node) if by_piece else step.cut_piece_of(node)
        return _RunKey(origin(node).phase, step.unit_of(node), slice_of(node), piece)


def _continues(step: StepGraph, other: fx.Node, key: _RunKey, by_piece: bool) -> bool:
    """True if ``other`` is part of the run ``key``; views belong to no unit, as they run anywhere."""
    if other.op != "call_function" or other.target in ops.EVENTS:
        return False
    other_key = _RunKey.from_node(step, other, by_piece)
    # What passes have added is of no piece, and runs with its neighbours. A slice of a weight is there for its own
    # nodes only.
    if other_key[:3] == key[:3] and (other_key.piece == key.piece or None in (other_key.piece, key.piece)):
        return True
    return is_view(other) and other.target is not operator.getitem
