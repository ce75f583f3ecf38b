"""The decisions to take about a step, and the plan that a choice of levels leads to, with its graph."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.buckets import Bucket
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.compress import compress
from zerofx.passes.activations.recompute import put_off, recompute
from zerofx.passes.activations.spread import spread
from zerofx.passes.divide import end_regions_at
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.cost.timeline import UnitPhase
from zerofx.scheduler.decide.activations import Segment
from zerofx.scheduler.decide.compress import compresses_of
from zerofx.scheduler.decide.gathers import reason_to_keep
from zerofx.scheduler.decide.gradients import place_gradients
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.offload import place, spreads_of
from zerofx.scheduler.decide.prefetch import place_arrivals
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.states import decisions_of
from zerofx.scheduler.decide.update_sides import Handed
from zerofx.scheduler.plan.decisions import Absence, AbsenceKind
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.order import Move, last_moves
from zerofx.scheduler.search.question import Question
from zerofx.units import format_bytes, format_seconds


@dataclass
class Choice:
    """Decisions of the levels that moves have reached, by kind; ``keep``: buckets to reasons."""

    prefetch: int
    keep: dict[str, str]
    seconds: dict[UnitPhase, float]  # of computation, what is computed again included
    hide_reductions: bool = True
    extra_keeps: dict[str, None] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    state_levels: dict[Bucket, Level] = field(default_factory=dict)  # of the same buckets
    away: dict[AbsenceKind, list[Absence]] = field(default_factory=lambda: defaultdict(list))
    each: dict[int, str] = field(default_factory=dict)  # buckets that are reduced in each micro-batch
    spreads: dict[str, str] = field(default_factory=dict)  # reasons by value, as of requests


Kind = Literal["activations", "spread", "kept", "prefetch", "awaited", "states", "parameters", "gradients"]


@dataclass(frozen=True)
class Item:
    """Something to decide about a step, with its menu of levels, the first of which it has before any move.

    It is about the activations of a run of a layer, or of a piece: what is not kept for backward, or in parts on the
    ranks of the model axis (``"spread"``); about a bucket: whether it stays gathered from forward to backward
    (``"kept"``), where its states, its parameters, or its gradients between micro-batches are; or about the step: how
    many units ahead gathers, and copies, are issued, and whether reductions are awaited a unit later. ``likewise``: the
    same run of other micro-batches, for which the same holds.
    """

    kind: Kind
    levels: Sequence[Level]
    about: Segment | Bucket | None = None
    likewise: Sequence[Segment] = ()

    @property
    def segment(self) -> Segment:
        assert isinstance(self.about, Segment), self.kind
        return self.about

    @property
    def bucket(self) -> Bucket:
        assert isinstance(self.about, Bucket), self.kind
        return self.about

    def stay(self, chosen: Choice) -> None:
        """Enter what the first level comes to, where no move is made."""
        if self.kind == "kept":
            chosen.keep[self.bucket.name] = reason_to_keep(self.bucket, self.levels[1])

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        """Enter what the level comes to that the last ``move`` has reached. What is gathered again is not kept: there
        is nothing to enter."""
        level, freed = self.levels[move.level], move.freed_bytes
        match self.kind:
            case "activations":
                self._choose_activations(move, question, chosen)
            case "spread":
                why = (
                    f"the last move for {self.segment.name} frees {format_bytes(freed)} on each of "
                    f"{question.layout.mesh.model} ranks for {format_seconds(move.extra_seconds)} to gather them"
                )
                chosen.spreads |= {value_node(self.segment.values[i]).name: why for i in level.spread}
            case "prefetch":
                is_last = move.level == len(self.levels) - 1
                chosen.prefetch = 0 if is_last else question.asked.prefetch - move.level
            case "awaited":
                chosen.hide_reductions = False
            case "gradients" if level.each:
                freeing = f"frees {format_bytes(freed)} in between for {format_seconds(level.exposed_seconds)} exposed"
                chosen.each[self.bucket.index] = f"reduced in each micro-batch: {freeing}"
            case "states" | "parameters" | "gradients":
                chosen.away[self.kind].append(self._absence(self.kind, move))
                if self.kind == "states":
                    chosen.state_levels[self.bucket] = level
                elif self.kind == "gradients":
                    chosen.each.pop(self.bucket.index, None)

    def _absence(self, kind: AbsenceKind, move: Move) -> Absence:
        """Absence of a bucket's tensors at the chosen level, before copies are placed."""
        level, when, side, num_bytes = self.levels[move.level], "", "", 0
        if self.kind == "states":
            on_host = level.update == "host"
            side = "; updated on the host: gradients down, parameters up" if on_host else "; states up and down"
        elif self.kind == "parameters":
            when = " between uses"
        else:
            when, num_bytes = " between micro-batches", self.bucket.gradient_bytes
        why = f"frees {format_bytes(move.freed_bytes)}{when} for {format_seconds(level.seconds)} exposed{side}"
        return Absence(
            kind=kind, bucket=self.bucket.index, tier=level.tier, update=level.update, num_bytes=num_bytes, reason=why
        )

    def _choose_activations(self, move: Move, question: Question, chosen: Choice) -> None:
        segment, level = self.segment, self.levels[move.level]
        again = (segment.unit, Phase.BACKWARD)
        extra = level.seconds * question.facts.share_run(segment.unit)
        chosen.seconds[again] = chosen.seconds.get(again, 0.0) + extra
        reached_level = f"level {move.level} of {len(self.levels) - 1} for {segment.name}"
        reason = (
            f"{reached_level}: the last move frees {format_bytes(move.freed_bytes)} for "
            f"{format_seconds(move.extra_seconds)} of computation"
        )
        if question.inlines and not level.seconds:
            reason = f"computed by the kernels of backward that read it: {format_bytes(move.freed_bytes)} less to keep"
        for part, i in itertools.product((segment, *self.likewise), range(len(segment.values))):
            storage = part.values[i]
            node = value_node(storage)
            if i in segment.needed and i not in level.saved:
                size = storage_bytes(tensors_of(node)[0])
                chosen.away["recomputes"].append(
                    Absence(kind="recomputes", value=node.name, num_bytes=size, reason=reason, layer=origin(node).layer)
                )
            elif i in level.saved and storage not in question.facts.activations:
                chosen.extra_keeps[node.name] = None
            if i in level.offloaded:
                chosen.requests[node.name] = reached_level


def plan_of(question: Question, items: Sequence[Item], moves: Sequence[Move]) -> tuple[Plan, StepGraph]:
    """The plan that some moves lead to, and a copy of the captured graph with tiles and recomputation carried out."""
    chosen = _choice(question, items, last_moves(moves))
    recomputed = frozenset(decision.value for decision in chosen.away["recomputes"])
    carried_out = question.facts.piece_graph.clone()
    recompute(carried_out, recomputed, frozenset(chosen.extra_keeps))
    ledger = _ledger(question, chosen)
    offloads = place(carried_out, chosen.requests, chosen.seconds, question.machine, ledger)
    if not offloads:
        put_off(carried_out)
    num_parts, offloaded = question.layout.mesh.model, {decision.value for decision in offloads}
    divided = question.facts.pieces_without(recomputed | offloaded)
    end_regions_at(carried_out, divided)
    spreads = spreads_of(carried_out, chosen.spreads, num_parts, offloaded)
    spread(carried_out, spreads, num_parts)
    saved, elsewhere = question.undecided.saved, offloaded | {decision.value for decision in spreads}
    compresses = compresses_of(carried_out, saved, elsewhere)
    compress(carried_out, compresses, saved)
    gradients = place_gradients(
        chosen.away["gradients"], carried_out, question.layout, chosen.seconds, question.machine
    )
    away = {**chosen.away, "offloads": offloads, "spreads": spreads, "compresses": compresses, "gradients": gradients}
    plan = replace(
        question.undecided, extra_keeps=tuple(chosen.extra_keeps), pieces=divided, tiles=question.tiles
    ).replace_absences(**away)
    keep = "all" if question.asked.keep == "all" else chosen.keep
    options = PolicyOptions(chosen.prefetch, keep, chosen.hide_reductions)
    plan = decide(carried_out, question.layout, plan, options, each=chosen.each)
    for decision in offloads:
        ledger.take(decision.tier, decision.num_bytes)
    plan = place_arrivals(
        plan,
        carried_out,
        question.layout,
        question.state_bytes,
        chosen.seconds,
        question.machine,
        ahead=chosen.prefetch > 0,
        handed=Handed(chosen.state_levels, ledger.left["host"]) if question.fixed is None else None,
        leaves_down=not question.has_arena,
        on_device=question.on_device,
        at_end=question.at_end,
    )
    return plan, carried_out


def _choice(question: Question, items: Sequence[Item], moves: Mapping[int, Move]) -> Choice:
    """Decisions about each item, given the last move made for those that have been moved."""
    asked = question.asked
    named = () if isinstance(asked.keep, str) else asked.keep
    chosen = Choice(asked.prefetch, dict.fromkeys(named, "as asked"), dict(question.facts.run_seconds))
    chosen.away["states"] += decisions_of(question.delayed)
    chosen.state_levels |= question.delayed
    if question.fixed is not None:
        for away in question.fixed:
            chosen.away[away.kind].append(away)
        chosen.state_levels |= question.levels_where_fixed
    chosen.away["gradients"] += question.gradients
    chosen.each |= question.buckets_reduced_each
    for number, item in enumerate(items):
        if number in moves:
            item.choose(moves[number], question, chosen)
        else:
            item.stay(chosen)
    return chosen


def _ledger(question: Question, chosen: Choice) -> Ledger:
    """Bytes that one rank has left for activations next to all else that is chosen to be off the device."""
    ledger, states = Ledger.of(question.machine, question.tiers), chosen.state_levels
    ledger.take_levels(list(states.values()))
    for parameters in chosen.away["parameters"]:
        bucket = question.layout.buckets[parameters.bucket]
        if bucket not in states or not states[bucket].parameter_bytes:
            ledger.take(parameters.tier, bucket.shard_bytes)
    for gradients in chosen.away["gradients"]:
        ledger.take(gradients.tier, gradients.num_bytes)
    return ledger
