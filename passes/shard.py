"""Put the model's parameters into flat buckets.

    stages 0 to 2                               stage 3
    params_0 = <full buffer on this rank>       shard_0 = <this rank's slice>
    w = as_strided(params_0, [4, 8], ...)       full = wait(all_gather(shard_0))
                                                w = as_strided(full, [4, 8], ...)

At stage 3 each bucket is gathered once, where the graph begins; the gather pass gives it its residencies. On one rank
a slice is the whole, so nothing is gathered at any stage. A slice in a slower tier is copied to the device first:

    shard_0 = <this rank's slice, on host or nvme>
    up = wait(reload(shard_0), shard_0)
    full = wait(all_gather(up), up)             # on one rank, up is all there is to gather

Does not handle: gradients and optimizer states (the reduce and update passes do).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import DEVICE, Origin, Phase, Placeholder, Role, placeholder, set_tier, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.optimizers import UpdateProgram
from zerofx.scheduler.plan.decisions import bucket_decisions
from zerofx.scheduler.plan.facts import TIERS, Tier
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Shard:
    """Replace parameter placeholders by views of bucket buffers."""

    layout: BucketLayout
    programs: Mapping[int, UpdateProgram] = field(default_factory=dict, hash=False)
    name: str = "shard"

    def run(self, step: StepGraph, plan: Plan) -> None:
        by_name = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
        for bucket in self.layout.buckets:
            used = [slot for slot in bucket.slots if by_name[slot.name].users]
            tier = parameter_tier(plan, bucket)
            if bucket.is_gathered(plan.stage) or tier != DEVICE:
                shard = set_tier(add_shard(step, bucket), tier)
                full = _gather_at_start(step, bucket, shard) if used else shard
            else:
                full = step.add_placeholder(
                    f"params_{bucket.index}", Placeholder(Role.FULL, bucket.name, bucket.index),
                    (bucket.numel,), bucket.compute_dtype,
                )  # fmt: skip
            program = self.programs.get(bucket.index)
            # Owners of whole parameters have masters of another size, which the update adds with their states.
            if bucket.has_master and not (program is not None and program.whole):
                add_master(step, bucket, bucket.updated_numel(plan.stage))
            for slot in reversed(used):
                with step.graph.inserting_after(full if full.op == "call_function" else step.last_placeholder()):
                    view = insert_call(
                        step.graph, torch.ops.aten.as_strided.default,
                        (full, list(slot.shape), list(slot.stride), slot.offset),
                        Origin(slot.name.rpartition(".")[0], Phase.FORWARD), name=slot.name.replace(".", "_"),
                        fake=step.fake_view(full, slot.shape, slot.stride, slot.offset),
                    )  # fmt: skip
                by_name[slot.name].replace_all_uses_with(view)
            for slot in bucket.slots:
                step.graph.erase_node(by_name[slot.name])


def parameter_tier(plan: Plan, bucket: Bucket) -> Tier:
    """The tier of this rank's slice of a bucket's parameters between uses.

    Raises:
        PlanError: the plan says what cannot be.
    """
    decisions = bucket_decisions(plan.parameters, bucket.index)
    tier = next((tier for tier in TIERS if decisions and tier == decisions[0].tier), DEVICE)
    if decisions and (len(decisions) > 1 or tier == DEVICE or bucket.effective_stage(plan.stage) != 3):
        raise PlanError(
            f"expected at most one decision about the parameters of {bucket.name}, with tier host or nvme and at stage "
            f"3; found {decisions} at stage {bucket.effective_stage(plan.stage)}: make the plan anew"
        )
    return tier


def add_shard(step: StepGraph, bucket: Bucket, alias_of: str | None = None) -> fx.Node:
    """The placeholder of this rank's slice in the compute dtype, shape ``[bucket.shard_numel]``."""
    return step.add_placeholder(
        f"shard_{bucket.index}", Placeholder(Role.SHARD, bucket.name, bucket.index, alias_of, is_lent=bucket.is_lent),
        (bucket.shard_numel,), bucket.compute_dtype,
    )  # fmt: skip


def add_master(step: StepGraph, bucket: Bucket, local: int) -> fx.Node:
    """The placeholder of the values that the optimizer updates, shape ``[local]``, in the stored dtype."""
    facts = Placeholder(Role.MASTER, bucket.name, bucket.index)
    return step.add_placeholder(f"master_{bucket.index}", facts, (local,), bucket.dtype)


def _gather_at_start(step: StepGraph, bucket: Bucket, shard: fx.Node) -> fx.Node:
    where = Origin(bucket.name, Phase.FORWARD)
    whole = step.fake((bucket.numel,), bucket.compute_dtype)
    with step.graph.inserting_before(step.last_placeholder().next):
        up = shard
        if tier_of(shard) != DEVICE:
            pending = insert_call(step.graph, ops.reload, (shard,), where)
            up = insert_call(step.graph, ops.wait, (pending, shard), where)
            if bucket.num_ranks == 1:
                return up

        args, how = (up, bucket.index, bucket.num_ranks), dict(axes_argument(bucket.gathered_over))
        pending = insert_call(step.graph, ops.all_gather, args, where, how, fake=whole)
        return insert_call(step.graph, ops.wait, (pending,) if up is shard else (pending, up), where)
