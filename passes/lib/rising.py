"""Gathers of updated parameters, along one axis of a mesh after the other, up to the tensors that ranks compute
with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Placeholder, Role
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.passes.shard import add_shard
from zerofx.scheduler.plan.mesh import Axes
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class RisingGather:
    """One gather of new values: of ``own``, this rank's, into ``into``, with those along ``axes``."""

    into: fx.Node
    own: fx.Node
    axes: Axes
    name: str


@dataclass(frozen=True)
class Rising:
    """The gather of a bucket's new values that has been started, and the levels that follow it."""

    bucket: Bucket
    node: fx.Node
    rest: tuple[RisingGather, ...]


def update_target(
    step: StepGraph, plan: Plan, bucket: Bucket, full: fx.Node | None, shard: fx.Node | None
) -> tuple[fx.Node, tuple[RisingGather, ...]]:
    """The placeholder that this rank updates of a bucket, in the compute dtype, and the gathers that follow.

    ``full`` and ``shard`` are the placeholders of the whole bucket and of this rank's slice, as far as there are any.
    """
    levels: list[RisingGather] = []
    whole = full if full is not None else shard
    assert whole is not None, "a bucket has values"
    if not bucket.is_cut(plan.stage):
        return (whole if shard is None else shard), ()
    if shard is None and bucket.num_ranks > 1:
        shard = add_shard(step, bucket, alias_of=whole.name)
    low = whole if shard is None else shard
    if bucket.num_parts > 1:
        part = step.add_placeholder(
            f"part_{bucket.index}", Placeholder(Role.PART, bucket.name, bucket.index, whole.name),
            (bucket.part_numel,), bucket.compute_dtype,
        )  # fmt: skip
        levels.append(RisingGather(low, part, bucket.parts_over, f"gather_part_{bucket.index}"))
        low = part
    if full is not None and shard is not None:
        levels.append(RisingGather(full, shard, bucket.gathered_over, f"gather_into_{bucket.index}"))
    return low, tuple(levels)


def start(step: StepGraph, bucket: Bucket, levels: Sequence[RisingGather]) -> list[Rising]:
    """Start the first of the gathers, if there is one, at the insertion point."""
    if not levels:
        return []
    first, *rest = levels
    where, args = Origin(bucket.name, Phase.UPDATE), (first.into, first.own, bucket.index)
    node = insert_call(step.graph, ops.all_gather_into, args, where, dict(axes_argument(first.axes)), name=first.name)
    return [Rising(bucket, node, tuple(rest))]


def go_on(step: StepGraph, rising: list[Rising], before: fx.Node) -> None:
    """Await the gathers in ``rising`` that others follow, and start those, before a node, which some are started after.

    ``rising`` then has those that are under way there.
    """
    # Nodes compare by their place in the graph.
    _await(step, rising, [gather for gather in rising if gather.rest and gather.node < before], before)


def finish(step: StepGraph, rising: list[Rising]) -> None:
    """Await all gathers, and those that follow, where the step ends."""
    while rising:
        _await(step, rising, list(rising), step.output)


def _await(step: StepGraph, rising: list[Rising], ready: Sequence[Rising], before: fx.Node) -> None:
    with step.graph.inserting_before(before):
        for gather in ready:
            insert_call(step.graph, ops.wait, (gather.node,), Origin(gather.bucket.name, Phase.UPDATE))
            rising.remove(gather)
            rising += start(step, gather.bucket, gather.rest)
