"""Put the optimizer into the graph: update a bucket as soon as its reduced gradient is there.

    grad_0 = wait(reduce_0, grads_0)        grad_0 = wait(reduce_0, grads_0)
                                            # hyper_0, made where the step begins: lr and the like of this step
                                            mul_(exp_avg_0, ...); ...               # the optimizer's own operators,
                                            addcdiv_(shard_0, exp_avg_0, ...)       # in place on the flat slice
                                            gather_into_0 = all_gather_into(params_0, shard_0)      # stages 1 and 2
                                            ...
                                            wait(gather_into_0)                     # where the step ends

Where the compute dtype is lower than the stored one, the update works on the fp32 master slice with the gradient cast
to its dtype, and the new values are cast into the slice that the graph computes with. Neither a whole buffer that stays
on the device nor a slice that is gathered is touched before its last reader of this step has run.

Does not handle: optimizers that need whole tensors (refused when the optimizer is traced), and clipping by the norm of
all gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx import ops
from zerofx.buckets import Bucket, BucketLayout
from zerofx.graph import Origin, Phase, Placeholder, Role, StepGraph, insert_call, placeholder, tensor
from zerofx.optimizers import UpdateProgram
from zerofx.passes.base import consumers, end_of_unit
from zerofx.passes.shard import add_shard
from zerofx.scheduler.plan import Plan

_aten = torch.ops.aten
_getitem = operator.getitem


@dataclass(frozen=True)
class Update:
    """Inline each bucket's update program behind its reduction. ``programs`` is keyed by bucket index."""

    layout: BucketLayout
    programs: Mapping[int, UpdateProgram] = field(hash=False)
    name: str = "update"

    def run(self, step: StepGraph, plan: Plan) -> None:
        pending = []
        for decision in plan.reduces:
            bucket = self.layout.buckets[decision.bucket]
            started = _update_bucket(step, plan, bucket, self.programs[bucket.index])
            if started is not None:
                pending.append((bucket, started))
        for bucket, started in pending:
            with step.graph.inserting_before(step.output):
                insert_call(step.graph, ops.wait, (started,), Origin(bucket.name, Phase.UPDATE))


def _update_bucket(step: StepGraph, plan: Plan, bucket: Bucket, program: UpdateProgram) -> fx.Node | None:
    """Insert the update; returns the started gather of the new values at stages 1 and 2."""
    graph, where = step.graph, Origin(bucket.name, Phase.UPDATE)
    local = bucket.shard_numel if plan.shards_optimizer else bucket.numel
    full = _placeholder_of(step, Role.FULL, bucket)
    shard = _placeholder_of(step, Role.SHARD, bucket)
    if full is not None and plan.shards_optimizer:
        shard = add_shard(step, bucket, alias_of=full.name)
    low = shard if shard is not None else full
    assert low is not None
    stored = _placeholder_of(step, Role.MASTER, bucket) or low
    reduced = step.reduced[bucket.index]
    # A gather reads the slice until it is done; its own readers, the release among them, come behind that.
    gathers = consumers(low) if full is None else []
    readers = consumers(full) if full is not None else [reader for gather in gathers for reader in consumers(gather)]
    # Nodes compare by their place in the graph.
    anchor = end_of_unit(step, max([reduced, *consumers(reduced), *readers]))
    with graph.inserting_before(anchor.next):
        grad = reduced
        if tensor(reduced).dtype != bucket.dtype:
            grad = insert_call(graph, _aten._to_copy.default, (reduced,), where, {"dtype": bucket.dtype})
        _inline(step, bucket, program, stored, grad, local, where)
        if bucket.has_master:
            insert_call(graph, _aten.copy_.default, (low, stored), where)
        if full is None or not plan.shards_optimizer:
            return None
        return insert_call(
            graph, ops.all_gather_into, (full, low, bucket.index), where, name=f"gather_into_{bucket.index}"
        )


def _inline(
    step: StepGraph, bucket: Bucket, program: UpdateProgram, stored: fx.Node, grad: fx.Node, local: int, where: Origin
) -> None:
    """Copy the program's operators into the step at the insertion point, on this bucket's tensors."""
    graph = step.graph
    known: dict[str, fx.Node] = {"param": stored, "grad": grad}
    for state in program.states:
        known[state.name] = step.add_placeholder(
            f"{state.name}_{bucket.index}", Placeholder(Role.STATE, state.name, bucket.index), (local,), state.dtype
        )
    for scalar in program.scalar_states:
        if scalar.name in program.tensor_scalars:
            assert scalar.dtype is not None, "what a kernel reads on the device is a tensor"
            known[scalar.name] = step.add_placeholder(
                f"{scalar.name}_{bucket.index}", Placeholder(Role.SCALAR_STATE, scalar.name, bucket.index), (),
                scalar.dtype,
            )  # fmt: skip
    with graph.inserting_after(step.last_placeholder()):
        hyper = insert_call(
            graph, ops.hyperparameters, (bucket.index, program.num_scalars), where, name=f"hyper_{bucket.index}"
        )
    env: dict[fx.Node, fx.Node] = {}
    num_scalars = 0
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in known:
            env[node] = known[node.target]
        elif node.op == "placeholder":
            env[node] = insert_call(graph, _getitem, (hyper, num_scalars), where)
            num_scalars += 1
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = insert_call(graph, node.target, tuple(args), where, dict(kwargs))


def _placeholder_of(step: StepGraph, role: Role, bucket: Bucket) -> fx.Node | None:
    return next((node for node in step.placeholders(role) if placeholder(node).bucket == bucket.index), None)
