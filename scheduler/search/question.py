"""The space of plans that a search may choose from: a captured graph on a machine, and the decisions allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from zerofx.choices import ReduceOption
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.residency import PolicyOptions
from zerofx.scheduler.decide.states import state_menus
from zerofx.scheduler.plan.decisions import Absence, TileDecision
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.graph_facts import GraphFacts

Leaning = Literal["recompute", "offload", "joint"]


@dataclass(frozen=True)
class Question:
    """The space of plans to search.

    ``undecided``: the plan in which nothing is decided yet. ``recompute``: whether activations may be computed again.
    ``tiers``: where they may be offloaded to, the first being filled first; none if empty. ``asked``: how buckets are
    gathered as long as memory allows. ``state_bytes``: bytes of one rank's optimizer states and masters, by bucket
    index. ``tile``: whether values may be tiled, and ``tile_classes`` logits over their classes too. ``delayed``: where
    states are in any case, so that their updates overlap with the next step; none if empty. ``fixed``: where states and
    parameters stay in any case, which no move changes; None where moves say it. ``inlines``: whether values may be
    computed again at no cost (``decide/activations.free_levels``). ``gradients``: which wait elsewhere between micro-
    batches in any case, with copies that are still to be placed. ``on_device``: buckets that can be updated on the
    device alone, ``at_end`` those of them whose update is one, where the step ends. ``reduce``: whether gradients may
    be reduced in each micro-batch, ``buckets_reduced_each``: those before any move.
    """

    facts: GraphFacts
    layout: BucketLayout
    undecided: Plan
    recompute: bool
    tiers: tuple[Tier, ...] = ()
    asked: PolicyOptions = field(default_factory=PolicyOptions)
    state_bytes: Mapping[int, int] = field(default_factory=dict)
    tile: bool = False
    tile_classes: bool = False
    delayed: Mapping[Bucket, Level] = field(default_factory=dict)
    fixed: tuple[Absence, ...] | None = None
    inlines: bool = False
    gradients: tuple[Absence, ...] = ()
    reduce: ReduceOption = "auto"
    buckets_reduced_each: Mapping[int, str] = field(default_factory=dict)
    on_device: frozenset[int] = frozenset()
    at_end: frozenset[int] = frozenset()

    def retile(self, tiles: tuple[TileDecision, ...]) -> Question:
        """The same question where values are tiled so."""
        return self if tiles == self.tiles else replace(self, facts=replace(self.facts, tiles=tiles))

    @property
    def divisions(self) -> tuple[Question, ...]:
        """The same question with what is outside layers in pieces, and whole, where there is that choice."""
        if not self.facts.is_divided:
            return (self,)
        return (self, replace(self, facts=replace(self.facts, divides=False)))

    @cached_property
    def levels_where_fixed(self) -> dict[Bucket, Level]:
        """Levels of states that ``fixed`` leaves off the device, where they are."""
        away = {decision.bucket for decision in self.fixed or () if decision.kind == "states"}
        if not away:
            return {}
        menus = state_menus(
            self.layout, self.state_bytes, self.stage, self.facts.seconds_of_one, self.machine,
            Ledger.of(self.machine, self.tiers), clipped=self.undecided.updates_wait,
            on_device=self.on_device, at_end=self.at_end,
        )  # fmt: skip
        return {bucket: off for bucket, (_, off) in menus.items() if bucket.index in away}

    @property
    def has_arena(self) -> bool:
        """True if what a step makes lies in one pool, outside of which is what runs on into the next one."""
        return self.facts.target is not None and self.facts.target.arena

    @property
    def stage(self) -> int:
        return self.undecided.stage

    @property
    def tiles(self) -> tuple[TileDecision, ...]:
        return self.facts.tiles

    @property
    def step(self) -> StepGraph:
        return self.facts.step

    @property
    def machine(self) -> Machine:
        return self.facts.machine

    @property
    def bytes_of_states(self) -> int:
        """Bytes of states and masters that are on the device before any move."""
        away = {bucket.index for bucket in (*self.delayed, *self.levels_where_fixed)}
        return sum(num_bytes for index, num_bytes in self.state_bytes.items() if index not in away)

    @property
    def leanings(self) -> tuple[Leaning, ...]:
        """The ways to hold fewer activations; the joint one chooses for each tensor. What turns hand on is not
        offloaded: there it is the one that offloads the rest."""
        if self.recompute and self.tiers:
            return ("joint", "recompute") if self.step.is_ahead else ("joint", "recompute", "offload")
        return ("offload",) if self.tiers else ("recompute",)
