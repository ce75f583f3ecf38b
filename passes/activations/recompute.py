"""Compute activations again in backward instead of keeping them.

    forward                                 forward
    a = mm(x, w1); b = gelu(a)              a = mm(x, w1); b = gelu(a)        # a dies here
    y = mm(b, w2)                           y = mm(b, w2)                     # b too
    ...                                     ...
    backward                                backward
    gb = mm(gy, t(w2))                      gb = mm(gy, t(w2))
    gw2 = mm(t(b), gy)                      a_again = mm(x, w1); b_again = gelu(a_again)
    ga = gelu_backward(gb, a)               gw2 = mm(t(b_again), gy)
                                            ga = gelu_backward(gb, a_again)

The plan says which forward values are *kept*; whatever else backward reads is computed again from kept values and
placeholders, just before its first reader, once. The operators are the same on the same inputs, so the bits are too.
What backward has computed already by then, and needs only after that reader, is put off until it is needed: it would
lie next to all that is recomputed. Not in a plan that offloads: copies come back where a layer's backward begins.

Does not handle: random operators. Their outputs are never computed again: the plan keeps them, and the pass refuses a
plan that does not.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.aliasing import aliased_input, is_view, node_bytes, storage_bytes, storage_source, tensors_of
from zerofx.ir.edit import consumers, erase_unread, runs_once
from zerofx.ir.facts import (
    Origin,
    Phase,
    copied_from,
    is_random,
    origin,
    piece_of,
    set_copied_from,
    set_origin,
    set_piece,
    set_twin,
    set_value,
    twin_of,
    value,
)
from zerofx.ir.graph import StepGraph
from zerofx.passes.lib.turns import hand_on_values
from zerofx.scheduler.analysis.saved_values import saved_values, value_node
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Recompute:
    """Let go of every forward value that the plan recomputes, and compute it again where backward needs it."""

    name: str = "recompute"

    def run(self, step: StepGraph, plan: Plan) -> None:
        recompute(step, frozenset(decision.value for decision in plan.recomputes), frozenset(plan.extra_keeps))
        if not plan.offloads:
            put_off(step)


def recompute(step: StepGraph, dropped: frozenset[str], extra: frozenset[str]) -> None:
    """Recompute the values named in ``dropped`` from what backward reads otherwise, and from ``extra``."""
    if not dropped:
        return
    saved = {node for node in saved_values(step) if node.name not in dropped}
    saved |= {node for node in step.calls() if node.name in extra}
    copies: dict[fx.Node, fx.Node] = {}
    backward = [node for node in step.calls() if origin(node).phase is Phase.BACKWARD]
    for reader in backward:
        for source in reader.all_input_nodes:
            if source.op == "call_function" and origin(source).phase is Phase.FORWARD:
                replacement = _recompute(step, source, saved, copies, reader)
                if replacement is not source:
                    reader.replace_input_with(source, replacement)
    hand_on_values(step)
    erase_unread(step.graph)


def _recompute(
    step: StepGraph, node: fx.Node, saved: set[fx.Node], copies: dict[fx.Node, fx.Node], reader: fx.Node
) -> fx.Node:
    """``node`` for ``reader``: itself if kept, else a copy before ``reader`` that later readers share."""
    pending = [node]
    while pending:
        current = pending[-1]
        if current in copies or _available(current, saved):
            pending.pop()
            continue
        missing = [s for s in current.all_input_nodes if s not in copies and not _available(s, saved)]
        if missing:
            pending.extend(missing)
            continue
        pending.pop()
        copies[current] = _copy(step, current, copies, reader)
        # The names of an operator's outputs stay next to it: a tuple does not cross a region's border.
        for user in current.users:
            if user.target is operator.getitem and user not in saved and not is_view(current):
                copies[user] = _copy(step, user, copies, reader)
    return copies.get(node, node)


def put_off(step: StepGraph) -> None:
    """Move backward's operators after the copies that stand before their first readers, where that frees memory."""
    places = sorted(node for node in step.calls() if copied_from(node) is not None)  # by their place in the graph
    backward = (
        [n for n in step.calls() if origin(n).phase is Phase.BACKWARD and copied_from(n) is None] if places else []
    )
    for node in reversed(backward):
        if is_view(node) or node.target is operator.getitem or runs_once(node):
            continue
        readers = consumers(node)
        first = min(readers, default=node)
        nearest = bisect_right(places, node)
        if nearest == len(places) or places[nearest] > first or _run_of(step, node) != _run_of(step, first):
            continue
        if step.output in readers or _bytes_freed(node) >= node_bytes(node):
            continue
        for moved in (node, *_names_of(node)):
            first.prepend(moved)


def _run_of(step: StepGraph, node: fx.Node) -> tuple[str, str | None]:
    return step.unit_of(node), piece_of(node)


def _bytes_freed(node: fx.Node) -> int:
    """Bytes of the values that ``node`` is the last to read."""
    owners = {storage_source(source) for source in node.all_input_nodes}
    return sum(
        storage_bytes(tensors_of(value_node(storage))[0])
        for storage in owners
        if storage[0].op == "call_function" and not any(reader > node for reader in consumers(storage[0]))
    )


def _names_of(node: fx.Node) -> list[fx.Node]:
    """The views and outputs that are named from ``node`` on, in order."""
    aliases: set[fx.Node] = set()
    pending = [node]
    while pending:
        source = pending.pop()
        # A wait reads the buffer that a collective still reads too, and names what that gives.
        views = [
            user
            for user in source.users
            if user.target is operator.getitem or (is_view(user) and aliased_input(user) is source)
        ]
        pending.extend(views)
        aliases.update(views)
    return sorted(aliases)


def _available(node: fx.Node, saved: set[fx.Node]) -> bool:
    return node in saved or node.op == "placeholder" or origin(node).phase is Phase.BACKWARD


def _copy(step: StepGraph, node: fx.Node, copies: dict[fx.Node, fx.Node], reader: fx.Node) -> fx.Node:
    if runs_once(node):
        what = "random operators give" if is_random(node) else "other stages send"
        raise PlanError(f"expected a plan that keeps what {what}, found {node.name} recomputed")
    with step.graph.inserting_before(reader):
        copy = step.graph.node_copy(node, lambda n: copies.get(n, n))
    twin = twin_of(node)
    set_value(set_twin(copy, twin and (f"{twin[0]} again", twin[1])), value(node))
    set_origin(copy, Origin(origin(node).layer, Phase.BACKWARD))
    if node.target is not operator.getitem and not is_view(node):
        set_copied_from(copy, node.name)
    piece = piece_of(reader)
    return copy if piece is None else set_piece(copy, piece)
