"""Updates of whole parameters in the update pass: what is sent to their owners, updated there, and sent back.

    owned_0 = to_owners(shard_0); grad_0_owned = to_owners(grad_0)      # none of these where nothing is cut
    update_whole([owned_0], [grad_0_owned], [whole_states_0])
    shard_0_new = from_owners(owned_0); copy_(shard_0, shard_0_new)

Where the optimizer updates values of another dtype than the graph computes with, those rest whole at their owners, as
states do. Gradients alone go there, and new values in the compute dtype come back:

    grad_0_owned = to_owners(grad_0)
    update_whole([master_0], [grad_0_owned.to(float32)], [whole_states_0])
    low_0 = cast_owned(master_0, numel, bfloat16)
    shard_0_new = from_owners(low_0); copy_(shard_0, shard_0_new)

What is under way goes on where the next bucket is sent: owners of one bucket work while those of others do. Updates of
an optimizer that combines parameters are one, where the step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.owners import Owners
from zerofx.ir.streams import axes_argument, axes_text
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.whole import OwnedSizes, owners_of, planned_sizes, whole_of
from zerofx.scheduler.plan.mesh import MODEL
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.operators import OpOverload

_aten = torch.ops.aten


@dataclass(frozen=True)
class Given:
    """A bucket to be updated whole: the values that the optimizer updates, which owners have from step to step or else
    lie in the slice, the reduced gradient, and the states. ``numel``: elements of the slice.

    ``is_done`` goes on once it is updated, and ``is_back`` once its new values are in the slice; owners that have the
    values from step to step send others, which that is given.
    """

    bucket: Bucket
    program: UpdateProgram
    param: fx.Node
    grad: fx.Node
    states: tuple[fx.Node, ...]
    numel: int
    is_done: Callable[[], None]
    is_back: Callable[[fx.Node | None], None]

    @property
    def origin(self) -> Origin:
        return Origin(self.bucket.name, Phase.UPDATE)


@dataclass(frozen=True)
class _Sent:
    """A bucket on its way to the owners of its parameters: the exchanges of values, if they are sent, and gradients."""

    given: Given
    owners: Owners
    owned: fx.Node | None
    grad: fx.Node


@dataclass(frozen=True)
class _ComingBack:
    """New values on their way back to the slices: the node that brings them, and what it reads until then."""

    given: Given
    node: fx.Node
    source: fx.Node


class WholeUpdates:
    """The updates of whole parameters of a step, put in one after the other, and what is under way between them.

    ``sizes``: what a rank keeps of each bucket. ``factors`` are what gradients are multiplied by.
    """

    def __init__(
        self,
        step: StepGraph,
        plan: Plan,
        layout: BucketLayout,
        programs: Mapping[int, UpdateProgram],
        factors: Sequence[fx.Node],
    ) -> None:
        self._step, self._factors = step, factors
        self._owners = owners_of(layout, programs, plan.stage)
        _check_owners(plan, self._owners)
        away = {decision.bucket for decision in plan.states}
        self.sizes: dict[int, OwnedSizes] = planned_sizes(layout, programs, self._owners, away)
        self._flops_of_bucket = _flops_of_buckets(self._owners, programs)
        self._sent: list[_Sent] = []
        self._last_sent: fx.Node | None = None  # the node before which the last one has been sent
        self._coming_back: list[tuple[list[_ComingBack], list[_Sent]]] = []
        self._joint: dict[int, list[_Sent]] = {}  # by optimizer: those that combine parameters

    def are_kept(self, bucket: Bucket) -> bool:
        """True if owners have the values that the optimizer updates from step to step, apart from slices."""
        return bucket.has_master and bucket.index in self._owners and self._owners[bucket.index].are_apart

    def place(self, end: fx.Node) -> fx.Node:
        """The node before which an update stands that could stand before ``end``: never before one under way began."""
        self._last_sent = end if self._last_sent is None else max(end, self._last_sent)
        return self._last_sent

    def add(self, given: Given) -> None:
        """Start sending a bucket to the owners of its parameters, and update the one before it meanwhile; those of an
        optimizer that combines parameters are updated where the step ends."""
        sent, joint = self._send(given), given.program.joint
        if joint is not None:
            self._joint.setdefault(joint, []).append(sent)
            return
        self._update()
        self._sent = [sent]
        if not sent.owners.are_apart:
            self._update()

    def finish(self) -> None:
        """Update what is under way, and await it, where the step ends."""
        self._update()
        for _, sent in sorted(self._joint.items()):
            self._sent = sent
            self._update()
        while self._coming_back:
            self._take_back()

    def _send(self, given: Given) -> _Sent:
        owners = self._owners[given.bucket.index]
        if not owners.are_apart:
            return _Sent(given, owners, None, given.grad)
        owned = None
        if not self.are_kept(given.bucket):
            owned = self._exchange(given, ops.to_owners, given.param, owners.numel, "owned")
        grad = self._exchange(given, ops.to_owners, given.grad, owners.numel, "owned_gradients")
        return _Sent(given, owners, owned, grad)

    def _update(self) -> None:
        """Update what has been sent to its owners, as one, and start sending it back.

        Other ranks own the next ones, and work on them at the same time: only from the bucket before as many as there
        are ranks is it awaited that its new values are back.
        """
        if not self._sent:
            return
        sent = sorted(self._sent, key=lambda each: each.given.bucket.index)
        self._coming_back.append((self._insert_update(sent), sent))
        num_ranks, self._sent = len(sent[0].owners.ranks), []
        while len(self._coming_back) > (num_ranks if num_ranks > 1 else 0):
            self._take_back()

    def _insert_update(self, sent: Sequence[_Sent]) -> list[_ComingBack]:
        """Insert one update of all these buckets, and start sending their new values back."""
        params, grads, parts = list[fx.Node](), list[fx.Node](), list[fx.Node]()
        for each in sent:
            owned, grad = self._receive(each)
            if each.given.bucket.has_model_parts:
                parts += [self._gather_parts(each, value) for value in (owned, grad)]
            params.append(owned)
            grads.append(grad)
        states = [state for each in sent for state in each.given.states]
        first, costs = sent[0].given, _costs(sent, self._flops_of_bucket)
        args = (params, grads, states, parts, first.bucket.index)
        self._call(first, ops.update_whole, args, costs, name=f"update_{first.bucket.index}")
        back = []
        for each, owned in zip(sent, params, strict=True):
            given = each.given
            given.is_done()
            if not each.owners.are_apart:
                continue
            if each.owned is None:
                low = (owned, each.owners.numel, given.bucket.compute_dtype)
                owned = self._call(given, ops.cast_owned, low, name=f"low_{given.bucket.index}")
            back.append(_ComingBack(given, self._exchange(given, ops.from_owners, owned, given.numel, "back"), owned))
        return back

    def _receive(self, sent: _Sent) -> tuple[fx.Node, fx.Node]:
        """The values to update and their gradients, at the owners, in the dtype of the update and with its factors."""
        given, owned, grad = sent.given, sent.given.param, sent.grad
        if sent.owned is not None:
            owned = self._call(given, ops.wait, (sent.owned, given.param))
        if sent.owners.are_apart:
            grad = self._call(given, ops.wait, (grad, given.grad))
        if tensor(grad).dtype != given.bucket.dtype:
            grad = self._call(given, _aten._to_copy.default, (grad,), {"dtype": given.bucket.dtype})
        for factor in self._factors:
            self._call(given, _aten.mul_.Tensor, (grad, factor))
        return owned, grad

    def _take_back(self) -> None:
        """Await new values, copy them over the slices that they are of, and go on."""
        coming, sent = self._coming_back.pop(0)
        by_bucket = {each.given.bucket.index: each for each in coming}
        for each in sent:
            given, back = each.given, by_bucket.get(each.given.bucket.index)
            if back is None:
                given.is_back(None)
                continue
            values = self._call(given, ops.wait, (back.node, back.source))
            if each.owned is not None:
                self._call(given, _aten.copy_.default, (given.param, values))
            given.is_back(None if each.owned is not None else values)

    def _gather_parts(self, sent: _Sent, own: fx.Node) -> fx.Node:
        """The owners' values on all ranks of the model axis, in a first dimension of ranks."""
        num_ranks = sent.given.bucket.mesh.model
        args, how = (own, num_ranks), {"over": axes_text(MODEL)}
        fake = self._step.fake((num_ranks, sent.owners.numel), tensor(own).dtype)
        started = insert_call(self._step.graph, ops.gather_values, args, sent.given.origin, how, fake=fake)
        return self._call(sent.given, ops.wait, (started, own))

    def _exchange(self, given: Given, op: OpOverload[..., Any], source: fx.Node, numel: int, stem: str) -> fx.Node:
        bucket = given.bucket
        moved = self._owners[bucket.index].num_moved
        args = (source, bucket.index, bucket.mesh.size(bucket.states_over), numel, moved)
        return self._call(given, op, args, dict(axes_argument(bucket.states_over)), name=f"{stem}_{bucket.index}")

    def _call(
        self, given: Given, op: Any, args: tuple[Any, ...], how: dict[str, Any] | None = None, name: str | None = None
    ) -> fx.Node:
        return insert_call(self._step.graph, op, args, given.origin, how, name=name)


def _check_owners(plan: Plan, owners: Mapping[int, Owners]) -> None:
    """Check that the owners that a plan names are those that all ranks find.

    Raises:
        PlanError: they are others.
    """
    for index, of_bucket in owners.items():
        bucket = plan.buckets[index]
        if bucket.owners and bucket.owners != of_bucket.rank_of_each:
            raise PlanError(
                f"expected the parameters of {bucket.name} at the owners that the plan has, {list(bucket.owners)}, "
                f"found that they are dealt out to {list(of_bucket.rank_of_each)}: make the plan anew"
            )


def _flops_of_buckets(owners: Mapping[int, Owners], programs: Mapping[int, UpdateProgram]) -> tuple[float, float]:
    """Floating-point operations of the busiest owner a bucket, and of the mean of all owners, over all buckets that are
    cut: owners of one bucket work while those of others do."""
    loads: dict[int, Counter[int]] = {}
    cut = {index: of_bucket for index, of_bucket in owners.items() if of_bucket.are_apart}
    for index, of_bucket in cut.items():
        load = loads.setdefault(len(of_bucket.ranks), Counter())
        for rank, owned in enumerate(of_bucket.ranks):
            load[rank] += sum(whole_of(programs[index], each.slot).flops for each in owned)
    most = max((max(load.values()) for load in loads.values()), default=0)
    mean = sum(load.total() / num_ranks for num_ranks, load in loads.items())
    return most / max(1, len(cut)), mean / max(1, len(cut))


def _costs(updates: Sequence[_Sent], flops_of_bucket: tuple[float, float]) -> dict[str, Any]:
    """The costs of the busiest owner, next to the mean of all."""
    flops, mean, cast, every = 0, 0, 0, []
    for sent in updates:
        cast += max(sum(whole_of(sent.given.program, e.slot).cast_bytes for e in owned) for owned in sent.owners.ranks)
        listed = [whole_of(sent.given.program, each.slot) for of_rank in sent.owners.ranks for each in of_rank]
        busiest, of_all = flops_of_bucket if sent.owners.are_apart else [sum(each.flops for each in listed)] * 2
        flops, mean = flops + int(busiest), mean + int(of_all)
        every += listed
    return {
        "flops": flops,
        "mean_flops": mean,
        "num_parameters": len(every),
        "dtype": max(every, key=lambda each: each.flops).flops_in,
        "scratch_bytes": cast + max(each.scratch_bytes for each in every),
        "over": axes_text(updates[0].given.bucket.states_over),
    }
