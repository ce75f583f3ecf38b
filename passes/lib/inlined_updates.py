"""An optimizer's update as operators of the step, on the device or on the host, at the insertion point."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import DEVICE, Origin, Phase, set_delayed, set_host_bucket, set_tier, tensor
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.passes.lib.placed_states import HOST
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
HYPERPARAMETERS = "hyperparameters"


def gradient_factors(step: StepGraph) -> dict[str, list[fx.Node]]:
    """Factors of the gradients on the device, applied in this order, as ``unscale_`` and then clipping do."""
    inverse = [] if step.unscaling is None else [step.unscaling.inverse]
    return {DEVICE: inverse + ([] if step.clipping is None else [step.clipping.factor])}


def copy_to_host(step: StepGraph, plan: Plan, factors: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """``factors``, copied to the host where the step ends, if something is updated there."""
    if all(decision.update != HOST for decision in plan.states):
        return {}
    graph, where, copies = step.graph, Origin("", Phase.UPDATE), []
    with graph.inserting_before(step.output):
        for factor in factors:
            # What is offloaded is not read on the device again, as the factor itself may be.
            copy = insert_call(graph, _aten.clone.default, (factor,), where, name=f"{factor.name}_copy")
            name = f"{factor.name}_offload"
            down = set_tier(insert_call(graph, ops.offload, (copy, HOST), where, name=name), HOST)
            copies.append(set_tier(insert_call(graph, ops.wait, (down, copy), where, name=f"{factor.name}_down"), HOST))
    return {HOST: copies}


def update_on_host(
    step: StepGraph,
    bucket: Bucket,
    program: UpdateProgram,
    known: Mapping[str, fx.Node],
    where: Origin,
    *,
    new: fx.Node,
    factors: Sequence[fx.Node] = (),
    delayed: bool = False,
) -> None:
    """Insert the update that the host runs by itself, with the cast of the gradient before it and, where ``new`` is
    another tensor than what is updated, that of the new values after it."""
    added = insert_update(step, bucket, program, known, where, HOST, factors)
    if new is not known["param"]:
        added.append(insert_call(step.graph, _aten.copy_.default, (new, known["param"]), where))
    for node in added:
        set_host_bucket(set_tier(node, HOST), bucket.index)
        if delayed:
            set_delayed(node, bucket.index)


def insert_update(
    step: StepGraph,
    bucket: Bucket,
    program: UpdateProgram,
    known: Mapping[str, fx.Node],
    where: Origin,
    tier: str,
    factors: Sequence[fx.Node],
) -> list[fx.Node]:
    """Insert an update, to run where ``tier`` is, after the gradient's cast and its ``factors``; returns the nodes."""
    grad, added = known["grad"], []
    if tensor(grad).dtype != bucket.dtype:
        grad = insert_call(step.graph, _aten._to_copy.default, (grad,), where, {"dtype": bucket.dtype})
        added.append(grad)
    added += [insert_call(step.graph, _aten.mul_.Tensor, (grad, factor), where) for factor in factors]
    for node in added:
        set_tier(node, tier)
    return added + _inline(step, program, {**known, "grad": grad}, where, tier)


def _inline(
    step: StepGraph, program: UpdateProgram, known: Mapping[str, fx.Node], where: Origin, tier: str
) -> list[fx.Node]:
    """Copy the program's operators into the step at the insertion point, to run where ``tier`` is; returns them."""
    added = []
    env: dict[fx.Node, fx.Node] = {}
    num_scalars = 0
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in known:
            env[node] = known[node.target]
        elif node.op == "placeholder":
            env[node] = insert_call(step.graph, operator.getitem, (known[HYPERPARAMETERS], num_scalars), where)
            num_scalars += 1
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = set_tier(insert_call(step.graph, node.target, tuple(args), where, dict(kwargs)), tier)
            added.append(env[node])
    return added
