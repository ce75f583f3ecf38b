"""Divide the nodes outside repeated layers into pieces, whose activations are decided on one by one.

    forward                                 forward
    a = tanh(mm(x, w1))                     a = tanh(mm(x, w1))                  # of the piece "mm to tanh"
    b = tanh(mm(a, w2))                     b = tanh(mm(a, w2))                  # of the piece "mm_1 to tanh_1"

Nodes are only marked, in forward and in backward: operators that backward puts off stay in their piece, and regions end
at the borders of pieces of which something is computed again or offloaded.

Does not handle: nodes that later passes add. They run with their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.edit import node_named, skip_getitems
from zerofx.ir.facts import Phase, origin, set_piece
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.decisions import PieceDecision
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Divide:
    """Mark the nodes of each piece that the plan names."""

    name: str = "divide"

    def run(self, step: StepGraph, plan: Plan) -> None:
        divide(step, plan.pieces)


def divide(step: StepGraph, pieces: Sequence[PieceDecision]) -> None:
    """Mark the nodes of ``pieces``.

    Raises:
        PlanError: the graph has no node of a name that a piece begins or ends with, or has them the other way round.
    """
    by_name = step.nodes_by_name()
    spans = [
        (piece.name, phase, node_named(by_name, first), node_named(by_name, last))
        for piece in pieces
        for phase, first, last in (
            (Phase.FORWARD, piece.first, piece.last),
            (Phase.BACKWARD, piece.back_first, piece.back_last),
        )
        if first is not None and last is not None
    ]
    for name, phase, first, last in spans:
        if last < first:  # nodes compare by their place in the graph
            raise PlanError(
                f"expected a piece that ends after it begins, found that {last.name}, with which the {phase} of {name} "
                f"ends, stands before {first.name} in this graph; make the plan anew for this model"
            )
    for name, phase, first, last in spans:
        node: fx.Node = first
        end = skip_getitems(last).next  # outputs stay with their operator, so that nothing is put between them
        while node is not end:
            if node.op == "call_function" and origin(node).phase is phase:
                set_piece(node, name)
            node = node.next
    end_regions_at(step, pieces)


def end_regions_at(step: StepGraph, pieces: Sequence[PieceDecision]) -> None:
    """Have regions end at the borders of those ``pieces`` some of whose values do not stay; all nodes are marked."""
    step.cut_pieces = frozenset(piece.name for piece in pieces if piece.values)
