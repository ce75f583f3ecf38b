"""Helpers of the update pass for updates of whole parameters: what is sent to their owners and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.owners import Owners
from zerofx.ir.streams import axes_argument, axes_text
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.program import WHOLE_STATES
from zerofx.optimizers.whole import whole_of
from zerofx.scheduler.plan.mesh import MODEL
from zerofx.torch_private.operators import OpOverload

_aten = torch.ops.aten


@dataclass(frozen=True)
class WholeUpdate:
    """A bucket whose parameters and gradients have been sent to their owners: ``param`` is what is updated of it,
    ``exchanges`` are the nodes that bring both, or the two themselves where nothing is cut."""

    bucket: Bucket
    program: UpdateProgram
    owners: Owners
    param: fx.Node
    grad: fx.Node
    exchanges: tuple[fx.Node, fx.Node]
    states: tuple[fx.Node, ...]

    @property
    def origin(self) -> Origin:
        return Origin(self.bucket.name, Phase.UPDATE)

    @property
    def is_sent(self) -> bool:
        """True if owners have it on other ranks."""
        return len(self.owners.ranks) > 1


@dataclass(frozen=True)
class SentBack:
    """New values on their way back to the slices: the node that brings them, and the update that they are of."""

    update: WholeUpdate
    node: fx.Node
    owned: fx.Node


def send_to_owners(
    step: StepGraph, bucket: Bucket, program: UpdateProgram, owners: Owners, known: Mapping[str, fx.Node]
) -> WholeUpdate:
    """Start sending parameters and gradients to their owners, at the insertion point."""
    param, grad = known["param"], known["grad"]
    states = (known[WHOLE_STATES],) if WHOLE_STATES in known else ()
    update = WholeUpdate(bucket, program, owners, param, grad, (param, grad), states)
    if not update.is_sent:
        return update
    owned = _exchange(step, update, ops.to_owners, param, owners.numel, "owned")
    owned_grad = _exchange(step, update, ops.to_owners, grad, owners.numel, "owned_gradients")
    return replace(update, exchanges=(owned, owned_grad))


def insert_whole_update(
    step: StepGraph, updates: Sequence[WholeUpdate], factors: Sequence[fx.Node], flops_of_bucket: float
) -> list[SentBack]:
    """Insert one update of all these buckets by the owners of their parameters, with gradients multiplied by factors,
    and start sending the new values back. ``flops_of_bucket`` as ``mean_flops`` gives them."""
    graph, first = step.graph, updates[0].bucket
    params, grads, parts = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for update in updates:
        owned, grad = update.exchanges
        if update.is_sent:
            owned = insert_call(graph, ops.wait, (owned, update.param), update.origin)
            grad = insert_call(graph, ops.wait, (grad, update.grad), update.origin)
        if tensor(grad).dtype != update.bucket.dtype:
            cast = {"dtype": update.bucket.dtype}
            grad = insert_call(graph, _aten._to_copy.default, (grad,), update.origin, cast)
        for factor in factors:
            insert_call(graph, _aten.mul_.Tensor, (grad, factor), update.origin)
        if update.bucket.has_model_parts:
            parts += [_gather_parts(step, update, value) for value in (owned, grad)]
        params.append(owned)
        grads.append(grad)
    states = [state for update in updates for state in update.states]
    args = (params, grads, states, parts, first.index)
    insert_call(
        graph, ops.update_whole, args, updates[0].origin, _costs(updates, flops_of_bucket), name=f"update_{first.index}"
    )
    return [
        SentBack(update, _exchange(step, update, ops.from_owners, owned, tensor(update.param).numel(), "back"), owned)
        for update, owned in zip(updates, params, strict=True)
        if update.is_sent
    ]


def take_back(step: StepGraph, sent: Sequence[SentBack]) -> None:
    """Await new values, and copy them over the slices that they are of."""
    for back in sent:
        new = insert_call(step.graph, ops.wait, (back.node, back.owned), back.update.origin)
        insert_call(step.graph, _aten.copy_.default, (back.update.param, new), back.update.origin)


def mean_flops(owners: Mapping[int, Owners], programs: Mapping[int, UpdateProgram]) -> float:
    """Floating-point operations of the busiest owner a bucket, over all buckets that are cut: owners of one bucket work
    while those of others do."""
    loads: Counter[tuple[int, int]] = Counter()
    cut = {index: of_bucket for index, of_bucket in owners.items() if len(of_bucket.ranks) > 1}
    for index, of_bucket in cut.items():
        for rank, owned in enumerate(of_bucket.ranks):
            flops = sum(whole_of(programs[index], each.slot).flops for each in owned)
            loads[len(of_bucket.ranks), rank] += flops
    return max(loads.values(), default=0) / max(1, len(cut))


def _costs(updates: Sequence[WholeUpdate], flops_of_bucket: float) -> dict[str, Any]:
    """The costs of the busiest owner."""
    flops, every = 0, []
    for update in updates:
        listed = [whole_of(update.program, each.slot) for of_rank in update.owners.ranks for each in of_rank]
        flops += int(flops_of_bucket) if update.is_sent else sum(each.flops for each in listed)
        every += listed
    return {
        "flops": flops,
        "dtype": max(every, key=lambda each: each.flops).flops_in,
        "scratch_bytes": max(each.scratch_bytes for each in every),
        "over": axes_text(updates[0].bucket.states_over),
    }


def _gather_parts(step: StepGraph, update: WholeUpdate, own: fx.Node) -> fx.Node:
    """The owners' values on all ranks of the model axis, in a first dimension of ranks."""
    args, how = (own, update.bucket.mesh.model), {"over": axes_text(MODEL)}
    started = insert_call(step.graph, ops.gather_values, args, update.origin, how)
    return insert_call(step.graph, ops.wait, (started, own), update.origin)


def _exchange(
    step: StepGraph, update: WholeUpdate, op: OpOverload[..., Any], source: fx.Node, numel: int, stem: str
) -> fx.Node:
    bucket, moved = update.bucket, sum(m.numel for m in update.owners.messages if m.owner != m.slice_rank)
    args = (source, bucket.index, bucket.mesh.size(bucket.states_over), numel, moved)
    how = dict(axes_argument(bucket.states_over))
    return insert_call(step.graph, op, args, update.origin, how, name=f"{stem}_{bucket.index}")
