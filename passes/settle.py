"""Await what runs on from the step before, where this step needs it first.

                                        settled_0 = settle(0)
    gather_0 = all_gather(shard_0)      gather_0 = all_gather(shard_0)
    ...                                 ...
    run_on(0, [shard_0_copy])           run_on(0, [shard_0_copy])

Gathers are where they are to be issued by then: what waits is the first node that reads what a copy writes, or what the
host updates. A copy from the host's memory waits for the host by itself, and so only its wait does here. What goes back
to its tier is awaited where the plan says, for the memory that it holds until then, or where it is read before that. In
the first step, and after whatever has finished updates since, there is nothing to wait for.

Does not handle: a loop over micro-batches by itself: all that is read in it is read in the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.edit import consumers, insert_call, node_named, start_of_unit
from zerofx.ir.facts import host_bucket, origin, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import background_work, num_gathers_after, runs_on_host
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Settle:
    """Put a ``settle`` in front of what needs each bucket that runs on."""

    name: str = "settle"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order, by_name = step.positions(), step.nodes_by_name()
        planned = {decision.bucket: decision.back_by for decision in plan.states}
        updates = updates_on_host(step)
        for run_on in [node for node in step.calls() if node.target is ops.run_on]:
            bucket, back = background_work(run_on)
            needed, by = readers_next(run_on, updates), planned.get(bucket)
            if back and by is not None:
                needed.append(start_of_unit(step, node_named(by_name, by)))
            first = min(needed, key=order.__getitem__)
            while num_gathers_after(first.prev):
                first = first.prev
            how, after = ({"back": True}, "back") if back else ({}, "settled")
            with step.graph.inserting_before(first if first.target in ops.EVENTS else start_of_unit(step, first)):
                insert_call(step.graph, ops.settle, (bucket, []), origin(run_on), how, name=f"{after}_{bucket}")


def updates_on_host(step: StepGraph) -> dict[int, list[fx.Node]]:
    """The nodes that compute on the host, by the bucket that they update."""
    updates: dict[int, list[fx.Node]] = {}
    for node in step.calls():
        if runs_on_host(node) and (bucket := host_bucket(node)) is not None:
            updates.setdefault(bucket, []).append(node)
    return updates


def readers_next(run_on: fx.Node, updates: Mapping[int, Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes of a step that have to wait for the update that ``run_on`` left running in the step before.

    ``updates`` are those of ``updates_on_host``.
    """
    (bucket, back), copies = background_work(run_on), run_on.args[1]
    assert isinstance(copies, list | tuple)
    copied = dict.fromkeys(storage_source(copy)[0] for copy in copies if isinstance(copy, fx.Node))
    on_host = updates.get(bucket, ()) if not back else ()
    updated = dict.fromkeys(storage_source(node)[0] for update in on_host for node in mutated_inputs(update))
    return [
        reader
        for place in copied | updated
        if place.op == "placeholder"
        for reader in consumers(place)
        if place in copied or tier_of(place) != "host" or reader.target not in ops.TRANSFERS
    ]
