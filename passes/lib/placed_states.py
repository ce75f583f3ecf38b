"""Helpers of the update pass for optimizer states in slower tiers: they come up for the update and go down again.

    update on the device                              update on the host
    reduce_0 = reduce_scatter(grads_0, 0, 2)          reduce_0 = reduce_scatter(grads_0, 0, 2)
    exp_avg_0_reload = reload(exp_avg_0)              ...
    ...                                               grad_0 = wait(reduce_0, grads_0)
    grad_0 = wait(reduce_0, grads_0)                  grad_0_host_copy = copy_into(grad_0_host, grad_0)
    exp_avg_0_up = wait(exp_avg_0_reload, exp_avg_0)  mul_(exp_avg_0, ...); addcdiv_(master_0, ...)   # on the host
    mul_(exp_avg_0_up, ...); addcdiv_(shard_0, ...)   copy_(low_0, master_0)                          # in bf16
    exp_avg_0_down = copy_into(exp_avg_0, ...)        shard_0_copy = copy_into(shard_0, low_0)
    ...                                               ...
    wait(exp_avg_0_down, exp_avg_0_up)                run_on(0, [shard_0_copy], [grad_0_host, low_0])  # the step ends

The host runs updates on a lane of its own: one begins when its gradient has landed, and the copy of the new parameters
when it is done; computation waits for both in the next step (``passes/settle.py``), or where that is not to be
(``may_run_on``) at the end of this one, with ``settle(0, [grad_0_host, low_0])``.

Where gradients are clipped all updates are after the last reduction. A bucket's states then start on their way where
the one before it of those whose states are elsewhere is updated. A gradient that the host updates with goes down as
soon as it is reduced and its squares are summed, is awaited after the next bucket's reduction, and waits on the host.

The last copies of a bucket that is updated on the device are awaited where the next one is updated, so that they run
meanwhile, or where the step ends, or in the next one where the plan says so (``back_by``). States on nvme whose update
runs on the host are read into its memory and written back.

A delayed update (2101.06840, section 5) leaves the host to itself. What it did in the step before is awaited where
computation needs the old parameters no more; then the new ones come up, this step's gradient goes down, and the host
begins with that. It runs on during the rest of this step and the next one:

    settle(0)                                         # what the host began in the step before is done
    shard_0_up = copy_into(shard_0, master_0)         # low_0, where the compute dtype is lower
    grad_0_down = copy_into(grad_0_host, grad_0)
    mul_(exp_avg_0, ...); addcdiv_(master_0, ...)     # on the host, which waits for both copies by itself

A slice of parameters that lives in a slower tier is brought to its update like a state. Where it is the optimizer's
fp32 master that is updated, the slice is written only: the new values are cast, and copied over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, insert_call, node_named, start_of_unit
from zerofx.ir.facts import DEVICE, Origin, Phase, set_tier, tensor, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import ends_of
from zerofx.passes.shard import parameter_tier
from zerofx.scheduler.plan.decisions import Absence, bucket_decisions
from zerofx.scheduler.plan.facts import TIERS
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten

HOST = "host"


@dataclass(frozen=True)
class Started:
    """A copy that is still to be awaited: its node, what it reads until then, and whose it is."""

    node: fx.Node
    source: fx.Node
    bucket: Bucket


def state_decision(plan: Plan, bucket: Bucket) -> Absence | None:
    """The decision about a bucket's states; None if they are on the device.

    Raises:
        PlanError: the plan says what cannot be.
    """
    decisions = bucket_decisions(plan.states, bucket.index)
    if not decisions:
        return None
    decision = decisions[0]
    if (
        len(decisions) > 1
        or decision.tier not in TIERS
        or decision.tier == DEVICE
        or decision.update not in (DEVICE, HOST)
    ):
        raise PlanError(
            f"expected one decision about the states of {bucket.name}, with tier host or nvme and update on device or "
            f"host; found {decisions}: make the plan anew"
        )
    away = bucket_decisions(plan.parameters, bucket.index)
    if decision.delayed and (decision.tier != HOST or decision.update != HOST or away):
        raise PlanError(
            f"expected a delayed update of {bucket.name} with states on host, the update on host and parameters on the "
            f"device, found states on {decision.tier}, the update on {decision.update} and parameters on "
            f"{away[0].tier if away else DEVICE}: make the plan anew"
        )
    return decision


def may_run_on(plan: Plan, bucket: Bucket) -> bool:
    """True if a step may end before the host is done with a bucket's update: no other rank waits for the result, and
    users see none, as they do of parameters that stay whole on the device in their own dtype."""
    is_shared = bucket.is_cut(plan.stage) and not (bucket.is_gathered(plan.stage) and bucket.num_parts == 1)
    is_hidden = bucket.is_gathered(plan.stage) or bucket.has_master or parameter_tier(plan, bucket) != DEVICE
    return is_hidden and not is_shared


class PlacedStates:
    """A bucket's tensors that may be in a slower tier, by the name that the update has for them.

    ``by_name`` has the captured graph's nodes, which the decision names.
    What the update does not work on where it lives is copied to it from where the plan says, or else from where the
    bucket's reduction starts: on one rank where the unit's run starts that completes its gradients; or from ``start``,
    if that is given. ``at_once``: it is copied where it is awaited. ``free``: the node after which the buffers that it
    passes through are free, if it has to wait for that.
    """

    def __init__(
        self,
        step: StepGraph,
        by_name: Mapping[str, fx.Node],
        bucket: Bucket,
        states: Mapping[str, fx.Node],
        decision: Absence | None,
        free: fx.Node | None = None,
        start: fx.Node | None = None,
    ) -> None:
        self._step, self._bucket, self._kept = step, bucket, states
        self._where = Origin(bucket.name, Phase.UPDATE)
        self._target = DEVICE if decision is None else decision.update
        away = {name: node for name, node in states.items() if tier_of(node) != self._target}
        self._source = dict(away)  # what each is copied from last
        self._pending: dict[str, fx.Node] = {}
        self.at_once = decision is not None and decision.at_once
        if not away or self.at_once:
            return
        if decision is not None and decision.reload_before:
            start = start_of_unit(step, node_named(by_name, decision.reload_before[0]))
        elif start is None:
            start = _start_of_reduction(step, bucket)
        if free is not None:
            start = max(start, free.next)  # nodes compare by their place in the graph
        if decision is not None and decision.read is not None and self._target == DEVICE:
            first = start_of_unit(step, node_named(by_name, decision.read))
            with step.graph.inserting_before(first if free is None else max(first, free.next)):
                on_nvme = {name: node for name, node in away.items() if tier_of(node) == "nvme"}
                reads = {name: self._copy(node, HOST, f"{node.name}_read") for name, node in on_nvme.items()}
            with step.graph.inserting_before(start):
                for name, pending in reads.items():
                    self._source[name] = self._await(pending, away[name], HOST, f"{away[name].name}_staged")
        with step.graph.inserting_before(start):
            self._reload()

    def _reload(self) -> None:
        for name, node in self._source.items():
            self._pending[name] = self._copy(node, self._target, f"{self._kept[name].name}_reload")

    def _copy(self, node: fx.Node, tier: str, name: str) -> fx.Node:
        args = (node,) if tier == DEVICE else (node, tier)
        return set_tier(insert_call(self._step.graph, ops.reload, args, self._where, name=name), tier)

    def _await(self, pending: fx.Node, source: fx.Node, tier: str, name: str) -> fx.Node:
        return set_tier(insert_call(self._step.graph, ops.wait, (pending, source), self._where, name=name), tier)

    def await_reloads(self) -> dict[str, fx.Node]:
        """Wait for the update's operands at the insertion point."""
        if self.at_once:
            self._reload()
        states = dict(self._kept)
        for name, pending in self._pending.items():
            states[name] = self._await(pending, self._source[name], self._target, f"{self._kept[name].name}_up")
        return states

    def write_back(self, updated: Mapping[str, fx.Node], left: Collection[str] = ()) -> list[Started]:
        """Start copying what was reloaded, and has been updated, back over what is stored, without those ``left``."""
        names = [name for name in self._pending if name not in left]
        return [copy_into(self._step, self._bucket, self._kept[name], updated[name]) for name in names]


def _start_of_reduction(step: StepGraph, bucket: Bucket) -> fx.Node:
    """The node before which copies start: after the start of the reduction, or on one rank before the unit's run that
    completes the gradients."""
    started = [node for node in step.calls() if node.target in ops.REDUCTIONS and node.args[1] == bucket.index]
    if started:
        return started[-1].next
    return start_of_unit(step, max(consumers(step.reduced[bucket.index])))


def start_descent(step: StepGraph, bucket: Bucket, gradient: fx.Node) -> Started:
    """Start copying the reduced gradient to the host at the insertion point."""
    where = Origin(bucket.name, Phase.UPDATE)
    down = insert_call(step.graph, ops.offload, (gradient, HOST), where, name=f"{gradient.name}_offload")
    return Started(set_tier(down, HOST), gradient, bucket)


def finish_descent(step: StepGraph, descent: Started) -> fx.Node:
    """Await it at the insertion point: the bucket's reduced gradient is what is on the host then."""
    where, args = Origin(descent.bucket.name, Phase.UPDATE), (descent.node, descent.source)
    down = insert_call(step.graph, ops.wait, args, where, name=f"{descent.source.name}_down")
    step.reduced[descent.bucket.index] = set_tier(down, HOST)
    return down


def descend_early(step: StepGraph, plan: Plan, layout: BucketLayout) -> None:
    """Have the reduced gradients of buckets that are updated on the host wait there, rather than on the device."""
    started: list[Started] = []
    for reduction in plan.reduces:
        bucket = layout.buckets[reduction.bucket]
        decision, reduced = state_decision(plan, bucket), step.reduced[bucket.index]
        place = max([reduced, *consumers(reduced)])  # nodes compare by their place in the graph
        ready = [reload for reload in started if reload.node < place]
        with step.graph.inserting_before(place.next):
            for descent in ready:
                finish_descent(step, descent)
            started = [reload for reload in started if reload not in ready]
            if decision is not None and decision.update == HOST:
                started.append(start_descent(step, bucket, reduced))
    with step.graph.inserting_before(step.output):
        for descent in started:
            finish_descent(step, descent)


def copy_into(step: StepGraph, bucket: Bucket, into: fx.Node, source: fx.Node) -> Started:
    """Start copying ``source`` over ``into`` at the insertion point."""
    where = Origin(bucket.name, Phase.UPDATE)
    node = insert_call(step.graph, ops.copy_into, (into, source), where, name=f"{into.name}_copy")
    return Started(node, source, bucket)


def new_values(step: StepGraph, bucket: Bucket, low: fx.Node, stored: fx.Node) -> list[Started]:
    """Give ``low``, which the model computes with, the values of ``stored``, which have been updated on the device."""
    where = Origin(bucket.name, Phase.UPDATE)
    if tier_of(low) == DEVICE:
        insert_call(step.graph, _aten.copy_.default, (low, stored), where)
        return []
    if tensor(stored).dtype != bucket.compute_dtype:
        low_dtype = {"dtype": bucket.compute_dtype}
        stored = insert_call(
            step.graph, _aten._to_copy.default, (stored,), where, low_dtype, name=f"low_{bucket.index}"
        )
    return [copy_into(step, bucket, low, stored)]


def empty_on_host(step: StepGraph, like: fx.Node, where: Origin, name: str) -> fx.Node:
    """A flat tensor of the host's as large as ``like``, and of its dtype, that is still to be written."""
    numel, dtype = tensor(like).numel(), tensor(like).dtype
    empty = insert_call(
        step.graph, ops.empty_stored, (numel, dtype, HOST), where, {"device": step.device}, name=name,
        fake=step.fake((numel,), dtype),
    )  # fmt: skip
    return set_tier(empty, HOST)


def await_copies(step: StepGraph, started: Sequence[Started]) -> dict[int, fx.Node]:
    """Await copies at the insertion point; returns the last wait for what each bucket has written to nvme."""
    written = {}
    for reload in started:
        where = Origin(reload.bucket.name, Phase.UPDATE)
        done = insert_call(step.graph, ops.wait, (reload.node, reload.source), where, name=f"{reload.node.name}_done")
        if leads_to_nvme(reload):
            written[reload.bucket.index] = done
    return written


def leads_to_nvme(copy: Started) -> bool:
    """True if a copy ends on nvme."""
    return ends_of(copy.node)[1] == "nvme"
