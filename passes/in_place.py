"""Mark the gathers that need no copy where ranks share memory: their slices are read in place.

    gather_0 = all_gather(shard_0, 0, 2)        |   gather_0 = all_gather(shard_0, 0, 2, in_place=True)
    full_0 = wait(gather_0)                     |   full_0 = wait(gather_0)
    ...                                         |   ...
    release(full_0)                             |   release(full_0)
    reduce_0 = reduce_scatter(grads_0, 0, 2)    |   reduce_0 = reduce_scatter(grads_0, 0, 2)
    grad_0 = wait(reduce_0, grads_0)            |   grad_0 = wait(reduce_0, grads_0)    # all ranks are past it
    copy_(shard_0, ...)                         |   copy_(shard_0, ...)

A gather that copies is done with the other ranks' slices when it has arrived. One that does not goes on reading them
until its release, so that no rank may write its slice before all of them are there. A reduction proves that: it waits
for every rank to have started it, and all ranks run the same nodes in the same order. So a bucket is marked where a
reduction starts after its last release and is awaited before its slice is written, or before the step ends if nothing
writes it. That slices are complete when a step begins to gather needs no proof here: no rank's first collective runs
before all ranks have begun the step. But a slice whose update runs on from the step before is complete on its own rank
only where that settles it, which the others do not know of: it is copied.

What marked gathers do is the runtime's (``zerofx/runtime/comm/same_host/shared.py``): ranks that do not share memory
copy as before.

Does not handle: slices in slower tiers, whose gathers read a copy that is freed; gathers in few bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source, tensors_of
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Role
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class InPlace:
    """Give the gathers of a bucket ``in_place=True`` where no slice of it changes before all ranks have read it."""

    name: str = "in_place"

    def run(self, step: StepGraph, plan: Plan) -> None:
        for gather in gathers_of_lasting_slices(step):
            gather.kwargs = {**gather.kwargs, "in_place": True}


def gathers_of_lasting_slices(step: StepGraph) -> list[fx.Node]:
    """The gathers of slices that stay as they are until every rank is done with what it has gathered of them."""
    order = step.positions()
    # Where each reduction starts, and where it is awaited, by the axes whose ranks take part.
    reductions: dict[object, list[tuple[int, int]]] = {}
    for node in step.calls():
        if node.target is ops.reduce_scatter and tensors_of(node)[0].numel():
            span = order[node], order[next(iter(node.users))]
            reductions.setdefault(node.kwargs.get("over"), []).append(span)
    lasting: list[fx.Node] = []
    left = (node for node in step.calls() if node.target is ops.run_on)
    runs_on = {storage_source(copy)[0] for node in left for copy in node.all_input_nodes}
    for shard in step.placeholders(Role.SHARD):
        if shard in runs_on:
            continue
        gathers = [user for user in shard.users if user.target is ops.all_gather]
        axes = gathers[0].kwargs.get("over") if gathers else None
        if _last(shard, gathers, order, reductions.get(axes, [])):
            lasting += gathers
    return lasting


def _last(
    shard: fx.Node, gathers: list[fx.Node], order: Mapping[fx.Node, int], reductions: list[tuple[int, int]]
) -> bool:
    released = 0
    for gather in gathers:
        (full,) = gather.users
        readers = consumers(full)
        if any(_writes(reader, full) for reader in readers):
            return False
        released = max(released, *(order[reader] for reader in readers))
    written = min((order[user] for user in consumers(shard) if _writes(user, shard)), default=len(order))
    return any(released < started and awaited < written for started, awaited in reductions)


def _writes(node: fx.Node, stored: fx.Node) -> bool:
    return any(storage_source(mutated) == storage_source(stored) for mutated in mutated_inputs(node))
