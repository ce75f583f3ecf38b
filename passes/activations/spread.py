"""Keep one part of a value on each rank of the model axis until backward, where all of them have all of it.

    forward                         forward
    a = relu(x)                     a = relu(x)
    y = mm(a, w)                    y = mm(a, w)
    ...                             part_a = index_select(view(a, [2, n / 2]), 0, model_rank)   # a dies here
    backward                        backward
    ...                             gather_a = gather_values(part_a); a_again = view(wait(gather_a), ...)
    gw = mm(t(a), gy)               gw = mm(t(a_again), gy)

(Partitioned activations of ZeRO-R: 1910.02054, 6.1.) Ranks have the same bits, so what is gathered has them too. It is
gathered where the unit that reads it first begins, and waited for. What is computed again is computed from it.

Does not handle: views, values that are written in place, results of the step, values that are not contiguous or have
no equal parts. A plan that spreads one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.edit import consumers, erase_unread, node_named, read_instead, skip_getitems, start_of_unit
from zerofx.ir.facts import Origin, Phase, Role, is_alike, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.offload import refusal
from zerofx.passes.lib.local_graph import LocalGraph
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.placements import REPLICATED, Sharded
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Spread:
    """Keep one part of a value on each rank of the model axis until backward, where all of them have all of it."""

    name: str = "spread"

    def run(self, step: StepGraph, plan: Plan) -> None:
        spread(step, plan.spreads, plan.model)


def spread(step: StepGraph, decisions: Sequence[Absence], num_parts: int) -> None:
    """Carry decisions out in place.

    Raises:
        PlanError: a value cannot be kept so.
    """
    order, by_name = step.positions(), step.nodes_by_name()
    values = [node_named(by_name, decision.value) for decision in decisions]
    for value in values:
        if num_parts < 2 or not can_be_spread(value, num_parts):
            raise PlanError(
                f"expected to keep one part of {value.name} on each of {num_parts} ranks, found that it is no value "
                f"of forward that backward reads, that all of them have, and that has equal parts: make the plan anew"
            )
    for value in values:
        _spread(step, value, num_parts, order)
    if values:
        erase_unread(step.graph)


def can_be_spread(value: fx.Node, num_parts: int) -> bool:
    """True if a node's value is one of forward of which each rank can keep a part until backward."""
    if refusal(value) is not None or not tensor(value).is_contiguous() or tensor(value).numel() % num_parts:
        return False
    phases = {origin(reader).phase for reader in consumers(value)}
    return phases == {Phase.FORWARD, Phase.BACKWARD} and is_alike(value) == 1


def _spread(step: StepGraph, value: fx.Node, num_parts: int, order: dict[fx.Node, int]) -> None:
    (rank,) = step.placeholders(Role.RANK)
    readers = sorted(consumers(value), key=order.__getitem__)
    backward = [reader for reader in readers if origin(reader).phase is Phase.BACKWARD]
    last = next(reader for reader in reversed(readers) if origin(reader).phase is Phase.FORWARD)
    shape, graph = list(tensor(value).shape), step.graph
    with graph.inserting_before(skip_getitems(last).next):
        local = LocalGraph(graph, num_parts, rank, None, Origin(origin(last).layer, Phase.FORWARD))
        flat = local.reshape(value, [tensor(value).numel()])
        part = local.convert(flat, REPLICATED, Sharded(0))
    where = Origin(origin(backward[0]).layer, Phase.BACKWARD)
    with graph.inserting_before(start_of_unit(step, backward[0], by_piece=True)):
        local = LocalGraph(graph, num_parts, rank, None, where)
        again = local.reshape(local.convert(part, Sharded(0), REPLICATED), shape)
    copies = {value: again}
    for reader in backward:
        read_instead(reader, value, copies, where)
