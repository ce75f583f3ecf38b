"""When each bucket is gathered, released and reduced, decided from the graph alone, which is not edited.

A bucket is resident while its unit runs: a residency ends where another unit's parameters are used before this
bucket's next use. Outside of layers it ends where a layer runs: what is between two layers is one region, such as that
around the loss, and stays one though a tied head is of another bucket. Gathers are issued a fixed number of units
ahead, and a reduction is awaited where the next unit's gradients are complete, so that each overlaps with the
computation of one unit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, Role, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_bodies, stretches
from zerofx.scheduler.decide.overlap import await_later, crossings, gather_later, issue_ahead
from zerofx.scheduler.plan.decisions import Absence, GatherDecision, ReduceDecision
from zerofx.scheduler.plan.facts import unit_of
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class PolicyOptions:
    """``prefetch``: units that a gather is issued ahead (0: where it is needed). ``keep``: names of buckets that
    stay gathered between forward and backward, or ``"all"``; where it is a mapping, names to reasons.
    ``hide_reductions``: whether reductions are awaited a unit later, or else where they are issued."""

    prefetch: int = 1
    keep: Collection[str] | str = ()
    hide_reductions: bool = True

    def reason_to_keep(self, bucket: Bucket) -> str:
        """The reason why a bucket is kept, as the end of a sentence."""
        return f": {self.keep[bucket.name]}" if isinstance(self.keep, Mapping) else ""

    def keeps(self, bucket: Bucket) -> bool:
        return self.keep == "all" or (not isinstance(self.keep, str) and bucket.name in self.keep)


@dataclass(frozen=True)
class Residency:
    """A bucket is gathered from ``first``, which reads it first, to ``last``."""

    bucket: Bucket
    first: fx.Node
    last: fx.Node
    reason: str


def decide(
    step: StepGraph,
    layout: BucketLayout,
    plan: Plan,
    options: PolicyOptions,
    *,
    each: Mapping[int, str] | None = None,
) -> Plan:
    """``plan`` with the decisions when buckets are gathered and reduced; equal inputs give an equal plan anywhere.

    ``step`` is the captured graph as it is once what else ``plan`` decides has been carried out, as far as that moves
    operators: what is tiled and recomputed. ``each``: the buckets whose gradients are reduced in each micro-batch, with
    reasons.
    """
    lent = tuple(
        Absence(
            kind="parameters", bucket=bucket.index, tier=bucket.lent_tier,
            reason="where the step has it that trains it",
        )
        for bucket in layout.buckets
        if bucket.lent_tier is not None
    )  # fmt: skip
    parameters = plan.parameters + lent
    gathered = {bucket.index for bucket in layout.buckets if bucket.is_gathered(plan.stage)}
    elsewhere = gathered | {decision.bucket for decision in parameters}
    resident = frozenset(range(len(layout.buckets))) - elsewhere
    return replace(
        plan.replace_absences(parameters=parameters),
        gathers=_decide_gathers(step, layout, options, resident) if gathered or parameters else (),
        reduces=_decide_reduces(step, layout, options, plan.stage, each or {}),
    )


def _decide_gathers(
    step: StepGraph, layout: BucketLayout, options: PolicyOptions, resident: Collection[int]
) -> tuple[GatherDecision, ...]:
    """``resident`` are the buckets that are on the device, whole, all the time."""
    stays = [stay for stay in residencies(step, layout, options) if stay.bucket.index not in resident]
    needed = [
        GatherDecision(stay.bucket.index, stay.first.name, stay.last.name, stay.first.name, stay.reason)
        for stay in stays
    ]
    return issue_ahead(needed, layout, options.prefetch, loop_bodies(step))


def residencies(step: StepGraph, layout: BucketLayout, options: PolicyOptions) -> list[Residency]:
    """All residencies of all buckets in the order of their first use.

    A round of a loop over micro-batches begins as it ends: what is not kept throughout is released in between. Where
    micro-batches run layer by layer, what a layer reads stays from the first to the last.
    """
    order, bodies, stretch_of = step.positions(), loop_bodies(step), stretches(step)
    uses = parameter_uses(step, layout)
    timeline = sorted((order[node], bucket.unit, _home(step, bucket)) for bucket, nodes in uses for node in nodes)
    stays = []
    for bucket, nodes in uses:
        start = 0
        for i in range(1, len(nodes) + 1):
            if i < len(nodes) and (
                options.keeps(bucket)
                or (step.by_layer and stretch_of[nodes[i - 1]] == stretch_of[nodes[i]])
                or (
                    bodies[nodes[i - 1].name] == bodies[nodes[i].name]
                    and not _other_unit_between(timeline, order, bucket, step.units, nodes[i - 1], nodes[i])
                )
            ):
                continue
            run = nodes[start:i]
            phases = {origin(node).phase for node in run}
            if phases == {Phase.FORWARD, Phase.BACKWARD}:
                begins_in_forward = origin(run[0]).phase is Phase.FORWARD
                span = "forward to backward" if begins_in_forward else "backward to the next micro-batch's forward"
                between = options.reason_to_keep(bucket) if options.keeps(bucket) else ": no layer runs in between"
                why = f"kept from {span}{between}"
            else:
                why = f"resident while {bucket.name} runs in {min(phases)}"
            stays.append(Residency(bucket, run[0], run[-1], why))
            start = i
    return sorted(stays, key=lambda residency: (order[residency.first], residency.bucket.index))


def parameter_uses(step: StepGraph, layout: BucketLayout) -> list[tuple[Bucket, list[fx.Node]]]:
    """For each bucket that is used, the nodes that read its parameters, in order."""
    order = step.positions()
    by_name = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
    uses = []
    for bucket in layout.buckets:
        nodes = {user for slot in bucket.slots for user in consumers(by_name[slot.name])}
        if nodes:
            uses.append((bucket, sorted(nodes, key=order.__getitem__)))
    return uses


def _home(step: StepGraph, bucket: Bucket) -> str:
    """The bucket's layer; for a slice, the layer of the sliced weight."""
    return unit_of(bucket.slots[0].name, step.units) if bucket.is_slice else bucket.unit


def _other_unit_between(
    timeline: list[tuple[int, str, str]],
    order: dict[fx.Node, int],
    bucket: Bucket,
    layers: Collection[str],
    before: fx.Node,
    after: fx.Node,
) -> bool:
    """True if another unit's parameters are used in between; for buckets outside of ``layers`` a layer's, or slices.
    A layer stays gathered while slices of its own weights pass."""
    lower = bisect_right(timeline, (order[before], "\U0010ffff", ""))
    upper = bisect_left(timeline, (order[after], "", ""))
    others = [
        (unit, computed_in) for _, unit, computed_in in timeline[lower:upper] if bucket.unit not in (unit, computed_in)
    ]
    if bucket.unit in layers or bucket.is_slice:
        return bool(others)
    return any(unit in layers or unit != computed_in for unit, computed_in in others)


def _decide_reduces(
    step: StepGraph, layout: BucketLayout, options: PolicyOptions, stage: int, each: Mapping[int, str]
) -> tuple[ReduceDecision, ...]:
    *earlier, last = [
        _reduces_of(step, layout, options, gradients, stage if number == step.num_bodies - 1 else None)
        for number, gradients in enumerate(step.gradients_by_body)
    ]
    places = [{decision.bucket: decision.wait_after for decision in body} for body in earlier]
    return tuple(
        replace(
            decision,
            reason=f"{each[decision.bucket]}; {decision.reason}",
            earlier=tuple(body[decision.bucket] for body in places),
        )
        if decision.bucket in each
        else decision
        for decision in last
    )


def _reduces_of(
    step: StepGraph,
    layout: BucketLayout,
    options: PolicyOptions,
    gradients: Mapping[str, fx.Node],
    stage: int | None,
) -> tuple[ReduceDecision, ...]:
    """The reductions after one micro-batch, whose ``gradients`` those are; ``stage`` is None for all but the last."""
    order = step.positions()
    complete = sorted(
        (max(order[gradients[slot.name]] for slot in bucket.slots), bucket.index)
        for bucket in layout.buckets
        if bucket.trainable
    )
    nodes = list(step.graph.nodes)
    at_once = [ReduceDecision(index, nodes[last].name, _wait_reason(layout.buckets[index])) for last, index in complete]
    if not options.hide_reductions:
        return crossings(at_once, layout, stage, later=False) if stage is not None else tuple(at_once)
    # Slices of weights are held for communication that overlaps with computation, or else not.
    hidden = tuple(
        early if layout.buckets[early.bucket].is_slice and not options.prefetch else late
        for early, late in zip(at_once, await_later(at_once, layout), strict=True)
    )
    if stage is None:
        return hidden
    return crossings(
        gather_later(hidden) if stage == 0 and layout.num_stage_ranks > 1 else hidden, layout, stage, later=True
    )


def _wait_reason(bucket: Bucket) -> str:
    if bucket.is_slice:
        return "awaited at once: no other slice is computed while it is under way"
    return "awaited at once: beside what follows there is no room for it"
