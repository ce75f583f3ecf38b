"""Offload activations to a slower tier between forward and backward.

    forward                                 forward
    a = relu(x)                             a = relu(x)
    y = mm(a, w)                            y = mm(a, w)
    ...                                     offload_a = offload(a, "host")      # after the unit that reads a last
    ...                                     ...
    ...                                     stored_a = wait(offload_a, a)       # as the plan says; a dies here
    backward                                backward
    ...                                     reload_a = reload(stored_a)         # as the plan says
    ...                                     ...
    gw = mm(t(a), gy)                       a_again = wait(reload_a, stored_a)  # before the unit that reads a first
                                            gw = mm(t(a_again), gy)

A copy has the strides of the original, and the bits. Copies begin and end where no unit's run is cut in two. Views that
backward reads are made again of what was reloaded, and values that are computed again read it too.

Does not handle: views, which share the memory of what they view, values that are written in place, and results of the
step. A plan that offloads one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source, tensors_of
from zerofx.ir.edit import (
    consumers,
    end_of_unit,
    erase_unread,
    insert_call,
    is_view_of,
    node_named,
    read_instead,
    skip_getitems,
    start_of_unit,
)
from zerofx.ir.facts import DEVICE, Origin, Phase, origin, set_tier, tensor
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import TIERS
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Offload:
    """Copy values out after their last use in forward, and back before their first use in backward."""

    name: str = "offload"

    def run(self, step: StepGraph, plan: Plan) -> None:
        if not plan.offloads:
            return
        places = _places(step, plan.offloads)
        stored = _copy_out(step, places)
        _copy_back(step, places, stored)
        erase_unread(step.graph)


@dataclass(frozen=True)
class _Place:
    """Positions of one decision's copies: out after ``issue`` and ``free``, back before ``reload`` and ``first``.

    ``readers`` are the nodes of backward that read the value, in order.
    """

    decision: Absence
    value: fx.Node
    readers: tuple[fx.Node, ...]
    issue: fx.Node
    free: fx.Node
    reload: fx.Node
    first: fx.Node


def _places(step: StepGraph, decisions: Sequence[Absence]) -> list[_Place]:
    """Check every decision before anything is changed.

    Raises:
        PlanError: one cannot be carried out.
    """
    order = step.positions()
    by_name = step.nodes_by_name()
    places = [_place(step, decision, order, by_name) for decision in decisions]
    twice = {place.value for place in places}
    if len(twice) < len(places):
        raise PlanError("expected a plan that offloads a value once, found one that is offloaded twice")
    return places


def _place(step: StepGraph, decision: Absence, order: dict[fx.Node, int], by_name: dict[str, fx.Node]) -> _Place:
    node = node_named(by_name, decision.value)
    if decision.tier == DEVICE or decision.tier not in TIERS:
        raise PlanError(
            f"expected {decision.value} to be offloaded to host or nvme, found tier {decision.tier!r}: make the plan "
            f"anew"
        )
    if len(decision.free_after) != 1 or len(decision.reload_before) != 1:
        raise PlanError(f"expected {decision.value} to leave once and come back once, found {decision}")
    if why := refusal(node):
        raise PlanError(why)
    readers = sorted(consumers(node), key=order.__getitem__)
    backward = [reader for reader in readers if origin(reader).phase is Phase.BACKWARD]
    if not backward:
        raise PlanError(f"expected to offload what backward reads, found that it does not read {node.name}")
    (free_after,), (reload_before,) = decision.free_after, decision.reload_before
    forward = [reader for reader in readers if origin(reader).phase is not Phase.BACKWARD]
    last = forward[-1] if forward else node
    place = _Place(
        decision,
        node,
        tuple(backward),
        issue=end_of_unit(step, skip_getitems(last), by_piece=True),
        free=end_of_unit(step, skip_getitems(node_named(by_name, free_after)), by_piece=True),
        reload=start_of_unit(step, node_named(by_name, reload_before), by_piece=True),
        first=start_of_unit(step, backward[0], by_piece=True),
    )
    if not order[place.issue] <= order[place.free] < order[place.reload] <= order[place.first]:
        raise PlanError(
            f"expected {node.name} to be copied out after {last.name}, freed after {free_after}, copied "
            f"back before {reload_before} and read by {backward[0].name}, in this order and with a unit's run "
            f"between the two in the middle; found another order: make the plan anew"
        )
    return place


def refusal(node: fx.Node) -> str | None:
    """The reason that a node's value cannot be offloaded, or None if it can."""
    if node.op != "call_function" or origin(node).phase is not Phase.FORWARD or len(tensors_of(node)) != 1:
        return f"expected to offload a tensor that forward computes, found {node.name}"
    source, index = storage_source(node)
    if value_node((source, index)) is not node and node.args[:2] != (source, index):
        return f"expected to offload a value with memory of its own, found {node.name}: a view of {source}"
    for reader in consumers(node):
        if reader.op == "output":
            return f"expected to offload what backward alone still needs, found a result: {node.name}"
        if any(is_view_of(written, node) for written in mutated_inputs(reader)):
            return f"expected to offload a value that is not written in place, found {node.name}"
    return None


def _copy_out(step: StepGraph, places: Sequence[_Place]) -> dict[fx.Node, fx.Node]:
    """Insert copies out and their waits; returns what is stored, by value."""
    tails: dict[fx.Node, fx.Node] = {}
    pending = {}
    # Copies start before others are awaited at the same place, so that they run meanwhile.
    for place in places:
        out = (place.value, place.decision.tier)
        added = _append_call(step, tails, place.issue, place.value, ops.offload, out, f"offload_{place.value.name}")
        pending[place.value] = set_tier(added, place.decision.tier)
    stored = {}
    for place in places:
        args = (pending[place.value], place.value)
        added = _append_call(step, tails, place.free, place.value, ops.wait, args, f"stored_{place.value.name}")
        stored[place.value] = set_tier(added, place.decision.tier)
    return stored


def _append_call(
    step: StepGraph,
    tails: dict[fx.Node, fx.Node],
    anchor: fx.Node,
    value: fx.Node,
    target: object,
    args: tuple[object, ...],
    name: str,
) -> fx.Node:
    """Insert a call after ``anchor`` and all calls appended to it before."""
    with step.graph.inserting_after(tails.get(anchor, anchor)):
        where = Origin(origin(value).layer, Phase.FORWARD)
        tails[anchor] = insert_call(step.graph, target, args, where, name=name, fake=tensor(value))
    return tails[anchor]


def _copy_back(step: StepGraph, places: Sequence[_Place], stored: dict[fx.Node, fx.Node]) -> None:
    graph = step.graph
    pending = {}
    # What starts at one place takes the link in the order in which it is read.
    for place in sorted(places, key=lambda place: place.first):
        where = Origin(origin(place.value).layer, Phase.BACKWARD)
        with graph.inserting_before(place.reload):
            name = f"reload_{place.value.name}"
            pending[place.value] = insert_call(graph, ops.reload, (stored[place.value],), where, name=name)
    for place in places:
        where = Origin(origin(place.value).layer, Phase.BACKWARD)
        with graph.inserting_before(place.first):
            args = (pending[place.value], stored[place.value])
            again = insert_call(graph, ops.wait, args, where, name=f"{place.value.name}_again")
        copies = {place.value: again}
        for reader in place.readers:
            read_instead(reader, place.value, copies, where)
