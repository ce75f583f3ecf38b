"""Gather parameters in 8 bits, and keep second shards on the node for later gathers (qwZ, hpZ of ZeRO++, 2306.10209).

    gather_0 = all_gather(shard_0)      |   small_0 = quantise(shard_0)
    full_0 = wait(gather_0)             |   gather_0 = all_gather(small_0)          # bytes
    ...                                 |   full_0 = wait(gather_0, small_0)
    gather_1 = all_gather(shard_0)      |   whole_0 = dequantise(full_0)
    full_1 = wait(gather_1)             |   second_0 = second_shard(whole_0)        # this rank's part of its node's
                                        |   ...
                                        |   gather_1 = gather_on_node(second_0)     # nothing leaves the node
                                        |   full_1 = wait(gather_1, second_0)

Runs after all other passes: everything stays where those have put it. With a second shard, backward computes with the
very values that forward had; without, with values that are quantised again from the same slice, which are the same.

Does not handle: gathers of new values at stages 1 and 2, second shards of slices in a slower tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import DEVICE, origin, set_value, task_of, tensor, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS
from zerofx.ir.streams import axes_argument, slice_gathered
from zerofx.scheduler.plan.decisions import WireDecision
from zerofx.scheduler.plan.plan import Plan

_GATHER_ENCODINGS = tuple(dict.fromkeys(encoding.gathers for encoding in ENCODINGS.values()))


@dataclass(frozen=True)
class QuantiseGathers:
    """Change the gathers of the buckets that the plan names."""

    layout: BucketLayout
    name: str = "quantise_gathers"

    def run(self, step: StepGraph, plan: Plan) -> None:
        for decision in plan.wires:
            if decision.gather == "exact" and not decision.second_shard:
                continue
            bucket = self.layout.buckets[decision.bucket]
            gathers = [
                node
                for node in step.calls()
                if node.target is ops.all_gather and node.args[1] == bucket.index and slice_gathered(node) is not None
            ]
            _check(plan, bucket, decision, gathers)
            first = _whole(gathers[0])
            if decision.gather != "exact":
                for gather in gathers[: 1 if decision.second_shard else None]:
                    whole = _quantise(step, bucket, gather, decision.gather)
                    first = whole if gather is gathers[0] else first
            if decision.second_shard:
                _gather_from_second_shard(step, plan, bucket, first, gathers[1:])


def check_block(plan: Plan, bucket: Bucket) -> None:
    """Check that a bucket's values can be quantised.

    Raises:
        PlanError: they are no floating-point numbers, or its slices are no whole blocks.
    """
    if not bucket.compute_dtype.is_floating_point:
        raise PlanError(
            f"expected exact gathers of {bucket.name}, whose values are {bucket.compute_dtype}, found a plan that "
            f"quantises them: only floating-point values can be rounded; make the plan anew"
        )
    if bucket.shard_numel % BLOCK:
        raise PlanError(
            f"expected slices of whole blocks of {BLOCK} elements in {bucket.name}, found {bucket.shard_numel} "
            f"elements: give wire={plan.wire!r}, which the plan was made with"
        )


def _check(plan: Plan, bucket: Bucket, decision: WireDecision, gathers: Sequence[fx.Node]) -> None:
    check_block(plan, bucket)
    if decision.gather not in ("exact", *_GATHER_ENCODINGS) or not gathers:
        raise PlanError(
            f"expected gathers in {' or '.join(_GATHER_ENCODINGS)} of a bucket that is gathered, found "
            f"{decision.gather!r} of {len(gathers)} gathers of {bucket.name}; make the plan anew"
        )
    if any(gather.merged for gather in plan.gathers):
        raise PlanError(
            f"expected gathers that start by themselves next to {bucket.name}, which is not sent exactly, found some "
            f"that start together; make the plan anew"
        )
    shard = slice_gathered(gathers[0])
    assert shard is not None
    num_nodes, _ = plan.nodes_along(bucket.gathered_over)
    if decision.second_shard and (len(gathers) < 2 or num_nodes < 2 or tier_of(shard) != DEVICE):
        raise PlanError(
            f"expected a second shard on several nodes, of a slice on the device that is gathered more than once, "
            f"found {len(gathers)} gathers of {bucket.name} from {tier_of(shard)} on {num_nodes} node(s); make "
            f"the plan anew"
        )


def _whole(gather: fx.Node) -> fx.Node:
    (awaited,) = gather.users
    return awaited


def _quantise(step: StepGraph, bucket: Bucket, gather: fx.Node, encoding: str) -> fx.Node:
    """Let a gather send bytes; returns the whole bucket."""
    graph, where, awaited, source = step.graph, origin(gather), _whole(gather), gather.args[0]
    task = task_of(gather)
    assert task is not None
    with graph.inserting_before(gather):
        small = insert_call(graph, ops.quantise, (source, 1, encoding), where, name=f"small_{task.index}")
    gather.args = (small, bucket.index, bucket.num_ranks)
    set_value(gather, step.fake((tensor(small).numel() * bucket.num_ranks,), torch.uint8))
    awaited.args = (gather, small)
    set_value(awaited, tensor(gather))
    with graph.inserting_after(awaited):
        whole = insert_call(
            graph, ops.dequantise, (awaited, bucket.num_ranks, encoding, bucket.compute_dtype), where,
            name=f"whole_{task.index}", fake=step.fake((bucket.numel,), bucket.compute_dtype),
        )  # fmt: skip
    awaited.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return whole


def _gather_from_second_shard(
    step: StepGraph, plan: Plan, bucket: Bucket, first: fx.Node, gathers: Sequence[fx.Node]
) -> None:
    """Keep this rank's part of ``first``, a whole bucket, and let the other ``gathers`` begin with it."""
    (_, local), how = plan.nodes_along(bucket.gathered_over), dict(axes_argument(bucket.gathered_over))
    args = (first, bucket.index, local)
    with step.graph.inserting_after(first):
        second = insert_call(step.graph, ops.second_shard, args, origin(first), how, name=f"second_{bucket.index}")
    last = second
    for gather in gathers:
        awaited = _whole(gather)
        gather.target, gather.args = ops.gather_on_node, (second, bucket.index, local)
        awaited.args = (gather, second)
        if gather < last:  # issued before the first was there: nodes compare by their place in the graph
            last.append(gather)
            last = gather
