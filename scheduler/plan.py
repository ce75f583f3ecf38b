"""The plan: every decision about a step with its reason, and what the step is predicted to take. Plain data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofx.errors import PlanError

FORMAT = 1
_PLAIN_FIELDS = (
    "stage", "num_ranks", "precision", "machine", "graph", "memory_budget", "num_micro_batches", "micro_batches_reason",
)  # fmt: skip


@dataclass(frozen=True)
class GatherDecision:
    """One residency of a bucket on the device.

    Positions are names of nodes of the captured graph: the gather is issued before ``issue``, awaited before ``first``
    (the first use), and the full buffer is released after ``last``. Where parameters live in a slower tier, the copy of
    this rank's slice to the device is issued before ``reload`` (None: before ``issue``), and its read from nvme into
    the host's memory before ``read`` (None: with the copy). On one rank the copy is all there is to gather.
    ``merged``: the gather starts as one collective with that of the decision before it, whose ``issue`` it has.
    """

    bucket: int
    first: str
    last: str
    issue: str
    reason: str
    reload: str | None = None
    read: str | None = None
    merged: bool = False


@dataclass(frozen=True)
class ReduceDecision:
    """The reduction of a bucket's gradients: issued after its last gradient, awaited (and the bucket updated) after
    node ``wait_after``; None means at the end of the step."""

    bucket: int
    wait_after: str | None
    reason: str


@dataclass(frozen=True)
class RecomputeDecision:
    """A forward value that is not kept for backward but computed again: node name, bytes, and why.

    ``layer`` is the dotted path of the module that makes the value, ``""`` the model itself.
    """

    value: str
    num_bytes: int
    reason: str
    layer: str = ""


@dataclass(frozen=True)
class TileDecision:
    """Logits that are made, and turned into their loss and its gradients, in ``num_tiles`` runs of rows.

    ``value`` is the node of the captured graph that gives the logits, ``num_bytes`` what they take whole, ``layer`` as
    in ``RecomputeDecision``.
    """

    value: str
    num_tiles: int
    num_bytes: int
    reason: str
    layer: str = ""


@dataclass(frozen=True)
class SliceDecision:
    """A parameter that is gathered, multiplied, reduced and updated ``num_slices`` runs of rows at a time.

    ``parameter`` is its first dotted name, ``num_bytes`` what it takes whole in the compute dtype. Each slice is a
    parameter of the captured graph, with a bucket of its own: ``"layers.0.mlp.up.weight[0:2048]"``.
    """

    parameter: str
    num_slices: int
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class OffloadDecision:
    """A forward value that waits for backward in a slower tier: ``"host"`` or ``"nvme"``.

    Positions are names of nodes of the captured graph. The copy out is issued behind the value's last reader in
    forward; it is awaited, and the value's memory on the device given back, behind ``free_after``. The copy back is
    issued before ``reload_before`` and awaited before the value's first reader in backward. ``layer`` as in
    ``RecomputeDecision``.
    """

    value: str
    tier: str
    num_bytes: int
    free_after: str
    reload_before: str
    reason: str
    layer: str = ""


@dataclass(frozen=True)
class StateDecision:
    """Where a bucket's optimizer states and fp32 masters live between steps (``tier``), and where its update runs.

    ``update`` is ``"device"`` (the states come up for the update and go down again) or ``"host"`` (the gradient goes
    down, and the parameters come up). A bucket without a decision has its states on the device.
    Positions are names of nodes of the captured graph: what the update works on is copied to it from before ``reload``
    (None: from where the bucket's reduction starts), and from nvme into the host's memory from before ``read``
    (None: with the copy). ``at_once``: all copies are made, and awaited, where the update is; nothing is held for it
    beside other computation, and nothing hides behind that. ``behind`` is the bucket whose buffers on the host it takes
    over on its way from nvme: its read starts when that bucket is written back, at the earliest.
    ``delayed``: an update on the host runs beside the next step, which computes with the parameters from before it and
    brings the new ones up when it needs the old no more (2101.06840, section 5: one-step delayed parameter update).
    """

    bucket: int
    tier: str
    update: str
    reason: str
    reload: str | None = None
    read: str | None = None
    at_once: bool = False
    delayed: bool = False
    behind: int | None = None

    @property
    def place(self) -> str:
        """Where the states live and are updated, in words."""
        return f"on {self.tier}, updated on the {self.update}{' beside the next step' if self.delayed else ''}"


@dataclass(frozen=True)
class ParameterDecision:
    """The slower tier that a rank's slice of a bucket's parameters lives in between uses: ``"host"`` or ``"nvme"``.

    The slice is in the compute dtype. It is copied to the device for each of the bucket's residencies, and brought to
    where the bucket is updated. A bucket without a decision has its parameters on the device.
    """

    bucket: int
    tier: str
    reason: str


@dataclass(frozen=True)
class GradientDecision:
    """The slower tier that a bucket's gradients wait in between micro-batches: ``"host"`` or ``"nvme"``.

    Positions are names of nodes of the captured graph, one of each for every micro-batch but the last: the copy out
    starts behind the micro-batch's last gradient of the bucket, and is awaited behind ``free_after``; the copy back
    starts before ``reload_before``, and is awaited before the next micro-batch's first gradient. A bucket without a
    decision has its gradients on the device.
    """

    bucket: int
    tier: str
    num_bytes: int
    free_after: tuple[str, ...]
    reload_before: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class WireDecision:
    """How a bucket goes over the wire where the user allows results that are not exact.

    ``gather`` is ``"exact"`` or ``"int8"``; ``reduce`` also ``"int4"``. With ``second_shard`` each rank keeps the part
    of the first gathered bucket that is its own among the ranks of its node, and later gathers stay on the node.
    A reduction that is not exact, on several nodes of several ranks, is a hop within nodes and one across: the second
    begins behind the node ``hop_after`` of the captured graph (None: where the bucket is updated).
    """

    bucket: int
    gather: str
    second_shard: bool
    reduce: str
    reason: str
    hop_after: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether nothing about the bucket is changed."""
        return self.gather == "exact" and not self.second_shard and self.reduce == "exact"


@dataclass(frozen=True)
class Prediction:
    """What a plan leads to, per rank: bytes by tier, seconds, bytes sent on the wire in one step, FLOPs.

    ``peak_bytes`` has the device and the slower tiers that the plan uses, ``peak_node`` is where the device's peak is
    reached, and ``peak_live`` what is live there, by category. ``link_bytes`` are moved between tiers in one step, by
    stream: ``to_host``, ``to_device``, ``nvme_read`` and ``nvme_write``.
    ``node_wire_bytes`` are what the ranks of the first node send together, ``"within"`` it and ``"across"`` nodes,
    where the plan was free to send less than exact values; empty elsewhere.
    ``least_seconds`` bounds the step from below: within the same budget, no choice of values to keep and to compute
    again takes less (``scheduler.bound``); None where nobody asked.
    """

    peak_bytes: dict[str, int]
    peak_node: str
    peak_live: dict[str, int]
    model_state_bytes: int
    wire_bytes: int
    step_seconds: float
    exposed_seconds: float
    flops: int
    link_bytes: dict[str, int] = field(default_factory=dict)
    least_seconds: float | None = None
    node_wire_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketSummary:
    """What a plan must know of a bucket to be recognised: its name, elements and dtypes."""

    name: str
    group: int | None
    num_parameters: int
    shard_numel: int
    dtype: str
    compute_dtype: str


@dataclass(frozen=True)
class GraphSummary:
    """What a plan must know of the captured graph to say how another one differs.

    ``placeholders`` are types by role and name (``"parameter head.weight"``: ``"float32[8, 4]"``), ``operators``
    numbers of calls by operator.
    """

    placeholders: dict[str, str]
    operators: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """All decisions for one captured step.

    ``graph`` is the fingerprint of the captured graph that the node names belong to, in which the parameters of
    ``slices`` are there in slices; ``summary`` is what is in it.
    ``extra_keeps`` are forward values
    that backward reads only because others are computed again from them. ``memory_budget`` is what the plan was made to
    fit, in bytes on the device. ``num_micro_batches`` is how many a batch is divided into, which run one after the
    other before the update. ``wire`` is what the plan was free to send (``"exact"``, ``"int8"``, ``"int4"``), and
    ``ranks_per_node`` where it takes nodes to end; both say nothing of an exact plan.
    """

    stage: int
    num_ranks: int
    precision: str | None
    machine: str
    graph: str
    buckets: tuple[BucketSummary, ...]
    gathers: tuple[GatherDecision, ...]
    reduces: tuple[ReduceDecision, ...]
    recomputes: tuple[RecomputeDecision, ...] = ()
    extra_keeps: tuple[str, ...] = ()
    tiles: tuple[TileDecision, ...] = ()
    slices: tuple[SliceDecision, ...] = ()
    offloads: tuple[OffloadDecision, ...] = ()
    states: tuple[StateDecision, ...] = ()
    parameters: tuple[ParameterDecision, ...] = ()
    gradients: tuple[GradientDecision, ...] = ()
    memory_budget: int | None = None
    num_micro_batches: int = 1
    micro_batches_reason: str = ""
    wire: str = "exact"
    ranks_per_node: int | None = None
    wires: tuple[WireDecision, ...] = ()
    prediction: Prediction | None = field(default=None, compare=False)
    summary: GraphSummary | None = field(default=None, compare=False)

    @property
    def launches(self) -> list[list[int]]:
        """The gathers that start together, as positions in ``gathers``: a list for each collective, in order."""
        found: list[list[int]] = []
        for number, gather in enumerate(self.gathers):
            if gather.merged and found:
                found[-1].append(number)
            else:
                found.append([number])
        return found

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters are sharded: stage 3 on more than one rank."""
        return self.stage == 3 and self.num_ranks > 1

    @property
    def has_residencies(self) -> bool:
        """Whether some bucket is on the device, whole, only while it is used: sharded, or in a slower tier."""
        return self.gathers_parameters or bool(self.parameters)

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank updates only its slice of a bucket: stages 1 to 3 on more than one rank."""
        return self.stage >= 1 and self.num_ranks > 1

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are on, as far as the plan cares: 1 where all it sends is exact."""
        return 1 if self.ranks_per_node is None else max(1, self.num_ranks // self.ranks_per_node)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak bytes by tier, per rank."""
        return self._predicted().peak_bytes

    @property
    def slower_peak_bytes(self) -> dict[str, int]:
        """Predicted peak bytes of the slower tiers that the plan uses, per rank."""
        return {tier: size for tier, size in self.peak_bytes.items() if tier != "device"}

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self._predicted().step_seconds

    @property
    def exposed_seconds(self) -> float:
        """Predicted seconds in which computation waits for communication."""
        return self._predicted().exposed_seconds

    @property
    def wire_bytes(self) -> int:
        """Predicted bytes that one rank sends in one step, padding included."""
        return self._predicted().wire_bytes

    @property
    def node_wire_bytes(self) -> dict[str, int]:
        """Predicted bytes that the ranks of one node send together, within it and across nodes; empty if exact."""
        return self._predicted().node_wire_bytes

    @property
    def link_bytes(self) -> dict[str, int]:
        """Predicted bytes that one rank moves between tiers in one step, by stream."""
        return self._predicted().link_bytes

    @property
    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer states of one rank, as ZeRO (1910.02054, section 3) counts."""
        return self._predicted().model_state_bytes

    def with_prediction(self, prediction: Prediction) -> Plan:
        return replace(self, prediction=prediction)

    def decisions_hash(self) -> str:
        """SHA-256 of all decisions without the prediction: what ranks compare before the first step."""
        data = self._as_dict()
        del data["prediction"], data["summary"]  # the fingerprint stands for the graph
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` gives an equal plan back."""
        return json.dumps({"format": FORMAT, **self._as_dict()}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the text is no plan of this format.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise PlanError(f"expected a plan of format {FORMAT}; make the plan anew with this version of zerofx")
            prediction, summary = data["prediction"], data["summary"]
            return Plan(
                **{name: data[name] for name in _PLAIN_FIELDS},
                buckets=tuple(BucketSummary(**b) for b in data["buckets"]),
                gathers=tuple(GatherDecision(**g) for g in data["gathers"]),
                reduces=tuple(ReduceDecision(**r) for r in data["reduces"]),
                recomputes=tuple(RecomputeDecision(**r) for r in data["recomputes"]),
                extra_keeps=tuple(data["extra_keeps"]),
                tiles=tuple(TileDecision(**t) for t in data["tiles"]),
                slices=tuple(SliceDecision(**s) for s in data["slices"]),
                offloads=tuple(OffloadDecision(**o) for o in data["offloads"]),
                states=tuple(StateDecision(**s) for s in data["states"]),
                parameters=tuple(ParameterDecision(**p) for p in data["parameters"]),
                gradients=tuple(
                    GradientDecision(
                        **{**g, "free_after": tuple(g["free_after"]), "reload_before": tuple(g["reload_before"])}
                    )
                    for g in data["gradients"]
                ),
                wire=data.get("wire", "exact"),
                ranks_per_node=data.get("ranks_per_node"),
                wires=tuple(WireDecision(**w) for w in data.get("wires", ())),
                prediction=Prediction(**prediction) if prediction else None,
                summary=GraphSummary(**summary) if summary else None,
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"expected the JSON of a zerofx plan, found something else: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, for ``zerofx.compile(plan=path)``; a file that exists is replaced."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save``, ``zerofx.tune`` or the command line has written.

        Raises:
            PlanError: there is no such file, or it holds no plan of this format.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"expected a plan in the file {path}, found none: {error}") from error
        return Plan.from_json(text)

    def why(self, name: str) -> str:
        """Every decision that concerns ``name``, a line each, with bytes and reasons.

        Args:
            name: a bucket (``"layers.3"``), a module in one or around some (``"layers.3.mlp"``, ``"layers"``), a node
                of the captured graph that a decision names, or ``"accumulate"``: why so many micro-batches.

        Raises:
            PlanError: the plan knows no such name; lists the nearest that it knows.
        """
        # As in __str__.
        from zerofx.report.why import why

        return why(self, name)

    def diff(self, other: Plan) -> str:
        """What is different in ``other``, in words: this plan's decisions and predictions -> those of ``other``."""
        # As in __str__.
        from zerofx.report.plan_diff import diff_plans

        return diff_plans(self, other)

    def __str__(self) -> str:
        # The text is a report's business, and reports are made of plans.
        from zerofx.report.plan_text import describe_plan

        return describe_plan(self)

    def _as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for name, exact in (("wire", "exact"), ("ranks_per_node", None), ("wires", ())):
            if data[name] == exact:
                del data[name]
        if self.prediction is not None and not self.prediction.node_wire_bytes:
            del data["prediction"]["node_wire_bytes"]
        return data

    def _predicted(self) -> Prediction:
        if self.prediction is None:
            raise PlanError("this plan has not been simulated yet: compile or plan a step with it first")
        return self.prediction
