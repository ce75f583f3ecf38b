"""Placeholders of the update pass: states, masters and scalars, which stay between steps, and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import DEVICE, Origin, Phase, Placeholder, Role, set_tier
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.whole import OwnedSizes
from zerofx.passes.lib.placed_states import HOST, state_decision
from zerofx.passes.shard import add_master, parameter_tier
from zerofx.scheduler.plan.plan import Plan

Nodes = dict[str, fx.Node]


def add_stored(
    step: StepGraph,
    plan: Plan,
    bucket: Bucket,
    program: UpdateProgram,
    master: fx.Node | None,
    owned: OwnedSizes | None = None,
) -> tuple[Nodes, Nodes, Nodes]:
    """Placeholders of a bucket's state between steps besides its parameters: states, and the master as ``param`` if
    there is one; the host buffers of a delayed update; and the scalar states that a kernel reads on the device.

    ``master``: the placeholder of the master that is there already, if there is one. ``owned``: of an update of whole
    parameters, what an owner keeps, states as bytes.
    """
    decision, local = state_decision(plan, bucket), bucket.updated_numel(plan.stage)
    on_host = decision is not None and decision.update == HOST
    if master is None and on_host and parameter_tier(plan, bucket) == DEVICE:
        master = add_master(step, bucket, local)
    if master is None and owned is not None and owned.has_master:
        master = add_master(step, bucket, owned.numel)

    def add(role: Role, dtypes: Mapping[str, torch.dtype], shape: tuple[int, ...], suffix: str = "") -> Nodes:
        return {
            name: step.add_placeholder(
                f"{name}_{bucket.index}{suffix}", Placeholder(role, name, bucket.index), shape, dtype
            )
            for name, dtype in dtypes.items()
        }

    of_states = local if owned is None else owned.state_bytes
    stored = add(Role.STATE, {state.name: state.dtype for state in program.states}, (of_states,))
    stored |= {} if master is None else {"param": master}
    for node in stored.values():
        set_tier(node, DEVICE if decision is None else decision.tier)
    delayed: Nodes = {}
    if decision is not None and decision.delayed:
        # Which stay from one step to the next: the reduced gradient, and the parameters' new values in the compute
        # dtype if the master has another.
        dtypes = {"grad": bucket.reduce_dtype} | ({"low": bucket.compute_dtype} if bucket.has_master else {})
        delayed = add(Role.DELAYED, dtypes, (local,), "_host")
        for node in delayed.values():
            set_tier(node, HOST)
    return stored, delayed, add(Role.SCALAR_STATE, {s.name: s.dtype for s in program.tensor_scalars}, ())


def add_hyperparameters(step: StepGraph, bucket: Bucket, program: UpdateProgram) -> fx.Node:
    """This step's scalars."""
    with step.graph.inserting_after(step.last_placeholder()):
        return insert_call(
            step.graph, ops.hyperparameters, (bucket.index, program.num_scalars), Origin(bucket.name, Phase.UPDATE),
            name=f"hyper_{bucket.index}",
        )  # fmt: skip
