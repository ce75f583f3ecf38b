"""The plan that a choice of levels leads to, and the graph that it is carried out on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerofx.ir.buckets import Bucket
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import put_off, recompute
from zerofx.passes.activations.spread import spread
from zerofx.passes.divide import end_regions_at
from zerofx.scheduler.cost.timeline import UnitPhase
from zerofx.scheduler.decide.gradients import place_gradients
from zerofx.scheduler.decide.offload import Capacity, OffloadRequest, place
from zerofx.scheduler.decide.prefetch import place_arrivals
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.spread import spreads_of
from zerofx.scheduler.decide.states import NUM_BUFFERS, StateLevel, decisions_of
from zerofx.scheduler.decide.update_sides import Handed
from zerofx.scheduler.plan.decisions import (
    GradientDecision,
    ParameterDecision,
    RecomputeDecision,
    StateDecision,
)
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.order import Move, Priced, reached
from zerofx.scheduler.search.question import Question


@dataclass
class Choice:
    """What the levels that moves have reached come to, by kind of decision; ``keep``: buckets to reasons."""

    prefetch: int
    keep: dict[str, str]
    seconds: dict[UnitPhase, float]  # of computation, what is computed again included
    hide_reductions: bool = True
    recomputes: list[RecomputeDecision] = field(default_factory=list)
    extra_keeps: dict[str, None] = field(default_factory=dict)
    requests: dict[str, OffloadRequest] = field(default_factory=dict)
    states: list[StateDecision] = field(default_factory=list)
    state_levels: dict[Bucket, StateLevel] = field(default_factory=dict)  # of the same buckets
    parameters: list[ParameterDecision] = field(default_factory=list)
    gradients: list[GradientDecision] = field(default_factory=list)
    each: dict[int, str] = field(default_factory=dict)  # buckets that are reduced in each micro-batch
    spreads: dict[str, str] = field(default_factory=dict)  # reasons by value


class Item(ABC):
    """Something to decide about a step, with its menu of levels, the first of which it has before any move."""

    levels: Sequence[Priced]

    def stay(self, chosen: Choice) -> None:
        """Enter what the first level comes to, where no move is made."""
        return

    @abstractmethod
    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        """Enter what the level comes to that the last ``move`` has reached."""


def plan_of(question: Question, items: Sequence[Item], moves: Sequence[Move]) -> tuple[Plan, StepGraph]:
    """The plan that some moves lead to, and a copy of the captured graph with tiles and recomputation carried out."""
    chosen = _choice(question, items, reached(moves))
    recomputed, extra = frozenset(decision.value for decision in chosen.recomputes), frozenset(chosen.extra_keeps)
    carried_out = question.facts.divided.clone()
    recompute(carried_out, recomputed, extra)
    left = capacity(question, chosen.state_levels, chosen.parameters, chosen.gradients)
    offloads = place(carried_out, list(chosen.requests.values()), chosen.seconds, question.machine, left)
    if not offloads:
        put_off(carried_out)
    num_parts, away = question.layout.mesh.model, {decision.value for decision in offloads}
    divided = question.facts.pieces_without(recomputed | away)
    end_regions_at(carried_out, divided)
    spreads = spreads_of(carried_out, chosen.spreads, num_parts, away)
    spread(carried_out, spreads, num_parts)
    plan = replace(
        question.undecided,
        recomputes=tuple(chosen.recomputes),
        extra_keeps=tuple(chosen.extra_keeps),
        pieces=divided,
        tiles=question.tiles,
        offloads=offloads,
        spreads=spreads,
        states=tuple(chosen.states),
        parameters=tuple(chosen.parameters),
        gradients=place_gradients(chosen.gradients, carried_out, question.layout, chosen.seconds, question.machine),
    )
    keep = "all" if question.asked.keep == "all" else chosen.keep
    options = PolicyOptions(chosen.prefetch, keep, chosen.hide_reductions)
    plan = decide(carried_out, question.layout, plan, options, each=chosen.each)
    spare = left.host - sum(decision.num_bytes for decision in offloads if decision.tier == "host")
    plan = place_arrivals(
        plan,
        carried_out,
        question.layout,
        question.state_bytes,
        chosen.seconds,
        question.machine,
        ahead=chosen.prefetch > 0,
        handed=Handed(chosen.state_levels, spare) if question.fixed is None else None,
        leaves_down=not question.has_arena,
    )
    return plan, carried_out


def _choice(question: Question, items: Sequence[Item], moves: Mapping[int, Move]) -> Choice:
    """What is decided about each item, given the last move made for those that have been moved."""
    asked = question.asked
    named = () if isinstance(asked.keep, str) else asked.keep
    chosen = Choice(asked.prefetch, dict.fromkeys(named, "as asked"), dict(question.facts.run_seconds))
    chosen.states += decisions_of(question.delayed)
    chosen.state_levels |= question.delayed
    if question.fixed is not None:
        chosen.states += question.fixed.states
        chosen.parameters += question.fixed.parameters
        chosen.state_levels |= question.levels_where_fixed
    chosen.gradients += question.gradients
    chosen.each |= question.reduced_each
    for number, item in enumerate(items):
        if number in moves:
            item.choose(moves[number], question, chosen)
        else:
            item.stay(chosen)
    return chosen


def capacity(
    question: Question,
    states: Mapping[Bucket, StateLevel],
    parameters: Sequence[ParameterDecision] = (),
    gradients: Sequence[GradientDecision] = (),
) -> Capacity:
    """What one rank has left for activations besides its states and parameters."""
    machine = question.machine
    left: dict[Tier, int] = {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank}
    for tier in left:
        left[tier] -= sum(placement.stored_bytes for placement in states.values() if placement.tier == tier)
        buckets = [question.layout.buckets[decision.bucket] for decision in parameters if decision.tier == tier]
        with_states = {bucket for bucket in buckets if bucket in states and states[bucket].parameter_bytes}
        left[tier] -= sum(bucket.shard_bytes for bucket in buckets if bucket not in with_states)
        left[tier] -= sum(decision.num_bytes for decision in gradients if decision.tier == tier)
    left["host"] -= sum(placement.waiting_bytes for placement in states.values())
    left["host"] -= NUM_BUFFERS * max((placement.passing_bytes for placement in states.values()), default=0)
    # What has to be there, such as states of a delayed update, may take more than there is.
    free = {tier: max(num_bytes, 0) for tier, num_bytes in left.items()}
    return Capacity({tier: free[tier] for tier in question.tiers}, free["host"])
