"""A captured graph and a machine, with what follows from the two for every plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from zerofx.ir.aliasing import Storage, storage_source
from zerofx.ir.facts import Phase, piece_of
from zerofx.ir.graph import StepGraph
from zerofx.passes.divide import divide
from zerofx.passes.tile import tile
from zerofx.scheduler.analysis.pieces import ForwardRun, forward_runs, pieces
from zerofx.scheduler.analysis.saved_values import saved_storages
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import UnitPhase, seconds_by_place
from zerofx.scheduler.decide.activations import Segment, segments
from zerofx.scheduler.decide.compress import bytes_in_8_bits
from zerofx.scheduler.plan.decisions import PieceDecision, TileDecision
from zerofx.scheduler.search.target import Target


@dataclass(frozen=True)
class GraphFacts:
    """A captured graph and a machine, with what follows from the two whatever is asked; each found once.

    ``tiles``: what is tiled in it. ``divides``: whether what is outside layers is divided into pieces where that pays;
    what is not can be computed again as a whole. ``target`` says how the step runs, where that is known. ``in_8_bits``:
    whether values may wait for backward so.
    """

    step: StepGraph
    machine: Machine
    tiles: tuple[TileDecision, ...] = ()
    divides: bool = True
    target: Target | None = None
    in_8_bits: bool = False

    @cached_property
    def tile_graph(self) -> StepGraph:
        """The captured graph with ``tiles`` carried out."""
        if not self.tiles:
            return self.step
        tiled = self.step.clone()
        tile(tiled, self.tiles)
        return tiled

    @cached_property
    def piece_graph(self) -> StepGraph:
        """``tile_graph`` with pieces marked."""
        if not self._pieces:
            return self.tile_graph
        divided = self.tile_graph.clone()
        divide(divided, self._pieces)
        return divided

    @cached_property
    def segments(self) -> list[Segment]:
        """Segments of ``piece_graph`` whose activations can be kept, recomputed or offloaded."""
        runs = forward_runs(self.piece_graph, self.activations, divides=self.divides) if self._pieces else self._runs
        return segments(self.piece_graph, runs, bytes_in_8_bits(self.piece_graph) if self.in_8_bits else {})

    @cached_property
    def _runs(self) -> list[ForwardRun]:
        return forward_runs(self.tile_graph, saved_storages(self.tile_graph), divides=self.divides)

    @cached_property
    def _pieces(self) -> tuple[PieceDecision, ...]:
        return pieces(self.tile_graph, self._runs)

    def pieces_without(self, values: Collection[str]) -> tuple[PieceDecision, ...]:
        """The pieces where the nodes named in ``values`` do not stay on the device; none where all do."""
        if not values or not self._pieces:
            return ()
        away: dict[str | None, list[str]] = {}
        for node in self.piece_graph.graph.nodes:
            if node.name in values:
                away.setdefault(piece_of(storage_source(node)[0]), []).append(node.name)
        return tuple(replace(piece, values=tuple(away.get(piece.name, ()))) for piece in self._pieces)

    @property
    def is_divided(self) -> bool:
        """True if anything outside layers is divided."""
        return bool(self._pieces)

    @cached_property
    def seconds(self) -> dict[UnitPhase, float]:
        """Seconds of computation by unit and phase."""
        return seconds_by_place(self.piece_graph, self.machine)

    @cached_property
    def run_seconds(self) -> dict[UnitPhase, float]:
        """Seconds of computation by unit and phase as the step runs, which copies are placed by."""
        return self.seconds if self.target is None else self.target.seconds_by_place(self.piece_graph)

    def share_run(self, unit: str) -> float:
        """Ratio of forward seconds of a unit as the step runs to the sum of its operators' rooflines."""
        alone = self.seconds.get((unit, Phase.FORWARD), 0.0)
        return self.run_seconds[unit, Phase.FORWARD] / alone if alone else 1.0

    @cached_property
    def seconds_of_one(self) -> dict[UnitPhase, float]:
        """Seconds of computation by unit and phase, of one micro-batch: what overlaps with a single transfer. Where
        micro-batches run layer by layer, it is that of all of them."""
        num_runs = 1 if self.step.by_layer else self.step.num_bodies
        return {place: total / num_runs for place, total in self.seconds.items()}

    @cached_property
    def activations(self) -> dict[Storage, None]:
        """Storages that forward makes and backward reads."""
        return saved_storages(self.piece_graph)
