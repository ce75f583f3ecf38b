"""The plan: every decision about a step with its reason, and what the step is predicted to take. Plain data."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from zerofx.disk.own_files import read_named, write_named
from zerofx.errors import PlanError
from zerofx.json_format import ONLY_IF_SET, from_data, to_data
from zerofx.scheduler.plan.decisions import (
    ABSENCE_KINDS,
    Absence,
    AbsenceKind,
    GatherDecision,
    MovedNodes,
    PieceDecision,
    ProductDecision,
    ReduceDecision,
    ShardingDecision,
    TileDecision,
    WireDecision,
)
from zerofx.scheduler.plan.facts import Arena, BucketSummary, GraphSummary, Prediction
from zerofx.scheduler.plan.mesh import Axes, Mesh
from zerofx.scheduler.plan.placements import Ragged, placement_of

_FORMAT = 3


@dataclass(frozen=True)
class Plan:
    """All decisions for one captured step.

    ``graph`` is the fingerprint of the captured graph that the node names belong to, in which the parameters of
    ``slices`` are there in slices; ``summary`` is what is in it. ``absences`` are all that is not on the device for a
    while, by kind; there is a property for each. ``extra_keeps`` are forward values that backward reads only because
    others are computed again from them. ``pieces`` are those that what is outside repeated layers is divided into,
    where not all values stay. ``memory_budget`` is what the plan was made to fit, in bytes on the device.
    ``num_micro_batches`` is how many a batch is divided into, which run one after the other before the update, or
    ``by_layer``: all of them through a layer before the next one.
    ``fp8`` is the recipe of those ``products`` that are taken in fp8, ``""`` where none may be.
    ``max_grad_norm`` is what the norm of all gradients is clipped to, None for gradients as they are. ``grad_norms``:
    whether those of layers are handed out. ``kept_gradients``: buckets whose gradients are. ``loss_scaled``:
    whether they are of a loss that is multiplied by a scale, and looked at before the first update. ``wire`` is what
    the plan was free to send (``"exact"``, or one of ``zerofx.ir.op_kernels.quantise.ENCODINGS``), and
    ``ranks_per_node`` where it takes nodes to end; both say nothing of an exact plan. ``saved`` is the encoding of the
    values that ``compresses`` names, ``""`` where none may be in 8 bits. ``replicate``, ``model`` and
    ``pipe`` are the ranks on those axes of the mesh; ``num_ranks`` are all there are. On ``pipe`` the plan is that of
    stage number ``pipe_stage``, and ``stage_cuts`` are the nodes of the captured graph's forward that later chunks
    begin with, of which each stage has as many; ``draws_together``: whether any of them draws random numbers, which all
    do then. ``weights_lag``: how many turns after the rest of backward it computes weight gradients, None for with it.
    ``states_reason``: why replicas update parts of slices each, or all of them the whole.
    """

    stage: int
    num_ranks: int
    precision: str | None
    machine: str
    graph: str
    buckets: tuple[BucketSummary, ...]
    gathers: tuple[GatherDecision, ...]
    reduces: tuple[ReduceDecision, ...]
    absences: tuple[Absence, ...] = ()
    extra_keeps: tuple[str, ...] = ()
    pieces: tuple[PieceDecision, ...] = field(default=(), metadata=ONLY_IF_SET)
    tiles: tuple[TileDecision, ...] = ()
    slices: tuple[TileDecision, ...] = ()
    shardings: tuple[ShardingDecision, ...] = field(default=(), metadata=ONLY_IF_SET)
    overlaps: tuple[MovedNodes, ...] = field(default=(), metadata=ONLY_IF_SET)
    fp8: str = field(default="", metadata=ONLY_IF_SET)
    products: tuple[ProductDecision, ...] = field(default=(), metadata=ONLY_IF_SET)
    memory_budget: int | None = None
    num_micro_batches: int = 1
    by_layer: bool = field(default=False, metadata=ONLY_IF_SET)
    max_grad_norm: float | None = field(default=None, metadata=ONLY_IF_SET)
    grad_norms: bool = field(default=False, metadata=ONLY_IF_SET)
    kept_gradients: tuple[str, ...] = field(default=(), metadata=ONLY_IF_SET)
    loss_scaled: bool = field(default=False, metadata=ONLY_IF_SET)
    micro_batches_reason: str = ""
    wire: str = field(default="exact", metadata=ONLY_IF_SET)
    ranks_per_node: int | None = field(default=None, metadata=ONLY_IF_SET)
    wires: tuple[WireDecision, ...] = field(default=(), metadata=ONLY_IF_SET)
    saved: str = field(default="", metadata=ONLY_IF_SET)
    replicate: int = field(default=1, metadata=ONLY_IF_SET)
    model: int = field(default=1, metadata=ONLY_IF_SET)
    pipe: int = field(default=1, metadata=ONLY_IF_SET)
    stage_cuts: tuple[str, ...] = field(default=(), metadata=ONLY_IF_SET)
    pipe_stage: int = field(default=0, metadata=ONLY_IF_SET)
    draws_together: bool = field(default=False, metadata=ONLY_IF_SET)
    weights_lag: int | None = field(default=None, metadata=ONLY_IF_SET)
    states_reason: str = field(default="", metadata=ONLY_IF_SET)
    prediction: Prediction | None = field(default=None, compare=False)
    summary: GraphSummary | None = field(default=None, compare=False)

    @cached_property
    def _by_kind(self) -> Mapping[AbsenceKind, tuple[Absence, ...]]:
        return {kind: tuple(away for away in self.absences if away.kind == kind) for kind in ABSENCE_KINDS}

    @property
    def recomputes(self) -> tuple[Absence, ...]:
        """The values that backward computes again."""
        return self._by_kind["recomputes"]

    @property
    def spreads(self) -> tuple[Absence, ...]:
        """The values that wait for backward in parts on the ranks of the model axis."""
        return self._by_kind["spreads"]

    @property
    def compresses(self) -> tuple[Absence, ...]:
        """The values that wait for backward in 8 bits."""
        return self._by_kind["compresses"]

    @property
    def offloads(self) -> tuple[Absence, ...]:
        """The values that wait for backward in a slower tier."""
        return self._by_kind["offloads"]

    @property
    def states(self) -> tuple[Absence, ...]:
        """The buckets whose optimizer states are in a slower tier between updates."""
        return self._by_kind["states"]

    @property
    def parameters(self) -> tuple[Absence, ...]:
        """The buckets whose parameters are in a slower tier between uses."""
        return self._by_kind["parameters"]

    @property
    def gradients(self) -> tuple[Absence, ...]:
        """The buckets whose gradients are in a slower tier between micro-batches."""
        return self._by_kind["gradients"]

    def replace_absences(self, **kinds: Iterable[Absence]) -> Plan:
        """The same with other absences of some kinds."""
        by_kind = (kinds.get(kind, of_kind) for kind, of_kind in self._by_kind.items())
        return replace(self, absences=tuple(itertools.chain.from_iterable(by_kind)))

    @property
    def launches(self) -> list[list[int]]:
        """The gathers that start together, as positions in ``gathers``: a list for each collective, in order."""
        launches: list[list[int]] = []
        for number, gather in enumerate(self.gathers):
            if gather.merged and launches:
                launches[-1].append(number)
            else:
                launches.append([number])
        return launches

    @property
    def updates_wait(self) -> bool:
        """True if all updates come after all reductions, as they depend on all gradients."""
        return self.max_grad_norm is not None or self.loss_scaled

    @property
    def mesh(self) -> Mesh:
        """The ranks that the plan is for."""
        others = self.replicate * self.model * self.pipe
        return Mesh(self.replicate, self.num_ranks // others, self.model, self.pipe)

    @property
    def num_stage_ranks(self) -> int:
        """The ranks of one stage: all of them without the axis ``pipe``."""
        return self.num_ranks // self.pipe

    @property
    def num_chunks(self) -> int:
        """The chunks of each stage."""
        return (len(self.stage_cuts) + 1) // self.pipe

    @property
    def has_casts(self) -> bool:
        """True if some weights are gathered as casts to fp8, in buckets of their own."""
        return any(gather.in_fp8 for gather in self.gathers)

    @property
    def has_parts(self) -> bool:
        """True if replicas update parts of a slice each."""
        return any(bucket.group is not None and bucket.states_over != bucket.gathered_over for bucket in self.buckets)

    def num_slices(self, bucket: BucketSummary) -> int:
        """Slices that a bucket's parameters and gradients are cut into."""
        return self.mesh.size(bucket.gathered_over)

    @property
    def gathers_parameters(self) -> bool:
        """True if parameters are sharded: stage 3 on more than one rank that does not only replicate."""
        return self.stage == 3 and self.num_stage_ranks > self.replicate

    @property
    def sends_rows(self) -> bool:
        """True if ranks send each other rows of experts, for which each has room for some."""
        return self.row_capacity > 0

    @cached_property
    def row_capacity(self) -> float:
        """The room of a rank for rows of experts that ranks send each other, in equal shares; 0 where none are sent."""
        of_rows = (decision for decision in self.shardings if decision.sends_rows)
        texts = {text for decision in of_rows for text in (*decision.outputs, *decision.inputs) if text is not None}
        lies = map(placement_of, texts)
        return max((each.capacity for each in lies if isinstance(each, Ragged)), default=0.0)

    @property
    def num_row_rounds(self) -> int:
        """The number of rounds in which ranks send each other rows of experts."""
        return max((decision.num_rounds for decision in self.shardings), default=1)

    @property
    def num_copied_experts(self) -> int:
        """The number of experts, those with the most rows, that each rank has copies of, next to its own."""
        return max((decision.num_copies for decision in self.shardings), default=0)

    @property
    def has_residencies(self) -> bool:
        """True if some bucket is whole on the device only while it is used: sharded, or in a slower tier."""
        return self.gathers_parameters or bool(self.parameters or self.gathers)

    @property
    def away(self) -> frozenset[int]:
        """The buckets whose parameters are in a slower tier between uses."""
        return frozenset(decision.bucket for decision in self.parameters)

    def nodes_along(self, axes: Axes) -> tuple[int, int]:
        """The nodes that a group of ranks along ``axes`` is on, as far as the plan cares, and how many each has:
        one node where all that is sent is exact."""
        size = self.mesh.size(axes)
        local = size if self.ranks_per_node is None else self.mesh.num_on_node(axes, self.ranks_per_node)
        return size // local, local

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak bytes by tier, per rank."""
        return self._require_prediction().peak_bytes

    @property
    def slower_peak_bytes(self) -> dict[str, int]:
        """Predicted peak bytes of the slower tiers that the plan uses, per rank."""
        return {tier: size for tier, size in self.peak_bytes.items() if tier != "device"}

    @property
    def arena(self) -> Arena | None:
        """The pool that what a step makes lies in, and what is outside of it; None where the step has none."""
        return self._require_prediction().arena

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self._require_prediction().step_seconds

    @property
    def exposed_seconds(self) -> float:
        """Predicted seconds in which computation waits for communication."""
        return self._require_prediction().exposed_seconds

    @property
    def wire_bytes(self) -> int:
        """Predicted bytes that one rank sends in one step, padding included."""
        return self._require_prediction().wire_bytes

    @property
    def node_wire_bytes(self) -> dict[str, int]:
        """Predicted bytes that the ranks of one node send together, within it and across nodes; empty if exact."""
        return self._require_prediction().node_wire_bytes

    @property
    def link_bytes(self) -> dict[str, int]:
        """Predicted bytes that one rank moves between tiers in one step, by stream."""
        return self._require_prediction().link_bytes

    @property
    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer states of one rank, as ZeRO (1910.02054, section 3) counts."""
        return self._require_prediction().model_state_bytes

    def with_prediction(self, prediction: Prediction) -> Plan:
        """The same decisions with another prediction."""
        return replace(self, prediction=prediction)

    def decisions_hash(self) -> str:
        """SHA-256 of all decisions without the prediction: what ranks compare before the first step."""
        data = to_data(self)
        del data["prediction"], data["summary"]  # the fingerprint stands for the graph
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` gives an equal plan back."""
        return json.dumps({"format": _FORMAT, **to_data(self)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the text is no plan of this format.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT and "reduces" in data:
                raise PlanError(f"expected a plan of format {_FORMAT}; make the plan anew with this version of zerofx")
            needed = [entry.name for entry in fields(Plan) if entry.name in data or entry.metadata != ONLY_IF_SET]
            return from_data(Plan, {name: data[name] for name in needed})  # a saved report has more
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"expected the JSON of a zerofx plan, found something else: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, for ``zerofx.compile(plan=path)``; a file that exists is replaced.

        That of a stage on the axis ``pipe`` has a file of its own, ``plan-1-of-2.json`` for ``plan.json``.
        """
        write_named(stage_path(path, self.pipe_stage, self.pipe), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save``, ``zerofx.tune`` or the command line has written.

        Raises:
            PlanError: there is no such file, or it holds no plan of this format.
        """
        try:
            text = read_named(path)
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"expected a plan in the file {path}, found none: {error}") from error
        return Plan.from_json(text)

    def why(self, name: str) -> str:
        """Every decision that concerns ``name``, a line each, with bytes and reasons.

        Args:
            name: a bucket (``"layers.3"``), a module in one or around some (``"layers.3.mlp"``, ``"layers"``), a piece
                of what is outside layers (as ``print`` names it), a node of the captured graph that a decision names,
                or ``"accumulate"``: why so many micro-batches.

        Raises:
            PlanError: the plan knows no such name; lists the nearest that it knows.
        """
        # As in __str__.
        from zerofx.scheduler.plan.text.why import why

        return why(self, name)

    def diff(self, other: Plan) -> str:
        """The differences of ``other``, in words: this plan's decisions and predictions -> those of ``other``."""
        # As in __str__.
        from zerofx.scheduler.plan.text.diff import diff_plans

        return diff_plans(self, other)

    def __str__(self) -> str:
        # The text is a report's business, and reports are made of plans.
        from zerofx.scheduler.plan.text.overview import describe_plan

        return describe_plan(self)

    def _require_prediction(self) -> Prediction:
        if self.prediction is None:
            raise PlanError("this plan has not been simulated yet: compile or plan a step with it first")
        return self.prediction


def stage_path(path: str | Path, number: int, num_stages: int) -> Path:
    """The file of a stage's plan where plans are saved as ``path``: that itself without stages."""
    whole = Path(path)
    return whole if num_stages == 1 else whole.with_stem(f"{whole.stem}-{number + 1}-of-{num_stages}")
