"""The decisions that a plan is made of, one class for each kind, with their reasons. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from zerofx.json_format import ONLY_IF_SET
from zerofx.scheduler.plan.facts import Tier


@dataclass(frozen=True)
class GatherDecision:
    """One residency of a bucket on the device.

    Positions are names of nodes of the captured graph: the gather is issued before ``issue``, awaited before ``first``
    (the first use), and the full buffer is released after ``last``. Where parameters live in a slower tier, the copy of
    this rank's slice to the device is issued before ``reload`` (None: before ``issue``), and its read from nvme into
    the host's memory before ``read`` (None: with the copy). On one rank the copy is all there is to gather.
    ``merged``: the gather starts as one collective with that of the decision before it, whose ``issue`` it has.
    ``in_fp8``: it is one of casts to fp8, which alone are read of it.
    """

    bucket: int
    first: str
    last: str
    issue: str
    reason: str
    reload: str | None = None
    read: str | None = None
    merged: bool = False
    in_fp8: bool = field(default=False, metadata=ONLY_IF_SET)


@dataclass(frozen=True)
class ReduceDecision:
    """The reduction of a bucket's gradients: issued after its last gradient, awaited (and the bucket updated) after
    node ``wait_after``; None means at the end of the step.

    At stage 0 the slices of the sum are gathered there, and awaited (and the bucket updated) after node
    ``gathered_after``: None as above, ``""`` where they are issued.

    With several micro-batches their gradients are added up, and reduced after the last one. Where ``earlier`` has a
    position for each body of a micro-batch but the last (``zerofx/ir/micro_batches.py``), each micro-batch's are
    reduced by themselves instead, awaited after that node (None: where the body ends), and added to this rank's slice.

    On a mesh, sums of slices are summed again across replicas from there on, once, which is awaited after
    ``crossed_after``: None as above, ``""`` where there is nothing to cross. Where all replicas update whole slices,
    ``gathered_after`` says where these are there.
    """

    bucket: int
    wait_after: str | None
    reason: str
    gathered_after: str | None = field(default="", metadata=ONLY_IF_SET)
    earlier: tuple[str | None, ...] = field(default=(), metadata=ONLY_IF_SET)
    crossed_after: str | None = field(default="", metadata=ONLY_IF_SET)

    @property
    def update_after(self) -> str | None:
        """The node after which the bucket is updated; None means at the end of the step."""
        places = (self.gathered_after, self.crossed_after, self.wait_after)
        return next((place for place in places if place != ""), None)


AbsenceKind = Literal["recomputes", "spreads", "compresses", "offloads", "states", "parameters", "gradients"]
ABSENCE_KINDS: tuple[AbsenceKind, ...] = get_args(AbsenceKind)
VALUE_KINDS: frozenset[AbsenceKind] = frozenset({"recomputes", "spreads", "compresses", "offloads"})


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A value that is not on the device for a while, or not whole: it leaves, and comes back by a link or computation.

    ``kind`` says what it is: a forward value that backward reads (``recomputes``, ``offloads``, ``spreads``,
    ``compresses``), by the node ``value`` of the captured graph and ``layer``, the dotted path of the module that makes
    it (``""``: the model itself); or of a ``bucket``, what is there between its uses: a rank's slice of parameters in
    the compute dtype (``parameters``), optimizer states and fp32 masters (``states``), or gradients between
    micro-batches (``gradients``). A bucket without an entry has them on the device.
    ``tier`` is where it is meanwhile; ``"device"`` where values are computed again, kept in parts on the ranks of the
    model axis, or in 8 bits. ``num_bytes`` are those of the value, whole, of one in 8 bits those that are freed, or of
    the gradients.

    Positions are names of nodes of the captured graph, one for each time that it leaves: for gradients one for every
    body of a micro-batch but the last (``zerofx/ir/micro_batches.py``). The copy out starts after the last reader, or
    the last gradient; it is awaited, and the memory given back, after ``free_after``. The copy back starts before
    ``reload_before``, and from nvme into the host's memory before ``read`` (None: with the copy); it is awaited where
    it is read. What an update works on comes back from where its bucket's reduction starts if there is no position.

    ``update`` is the side of the update of states: on the ``"device"`` they come up for it and go down again, on the
    ``"host"`` the gradient goes down, and the parameters come up. ``at_once``: all copies are made, and awaited, where
    the update is; nothing is held for it while something else computes, and nothing overlaps with them. ``takes_over``
    is the bucket whose buffers on the host it takes over on its way from nvme: its read starts when that bucket is
    written back, at the earliest. ``back_by``: what goes back to its tier after the update runs on into the next step,
    and is awaited there before this node; None: in its own step. ``delayed``: an update on the host runs during the
    next step, which computes with the parameters from before it and brings the new ones up when it needs the old no
    more (2101.06840, section 5: one-step delayed parameter update).
    """

    kind: AbsenceKind
    reason: str
    bucket: int = field(default=-1, metadata=ONLY_IF_SET)
    value: str = field(default="", metadata=ONLY_IF_SET)
    layer: str = field(default="", metadata=ONLY_IF_SET)
    tier: Tier = field(default="device", metadata=ONLY_IF_SET)
    num_bytes: int = field(default=0, metadata=ONLY_IF_SET)
    free_after: tuple[str, ...] = field(default=(), metadata=ONLY_IF_SET)
    reload_before: tuple[str, ...] = field(default=(), metadata=ONLY_IF_SET)
    read: str | None = field(default=None, metadata=ONLY_IF_SET)
    update: Tier = field(default="device", metadata=ONLY_IF_SET)
    at_once: bool = field(default=False, metadata=ONLY_IF_SET)
    delayed: bool = field(default=False, metadata=ONLY_IF_SET)
    takes_over: int | None = field(default=None, metadata=ONLY_IF_SET)
    back_by: str | None = field(default=None, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        if (self.bucket < 0, not self.value) != ((True, False) if self.kind in VALUE_KINDS else (False, True)):
            raise ValueError(f"expected the absence of a value, or of what a bucket has, found {self}")
        if (self.value or self.free_after) and not self.num_bytes:
            raise ValueError(f"expected the bytes of what is not on the device, found {self}")


@dataclass(frozen=True)
class TileDecision:
    """A tensor that is never whole on the device: it is worked with in ``num_tiles`` runs, one after the other.

    In ``Plan.tiles``, logits that are made, and turned into their loss and its gradients, a run of rows or of classes
    (``over``) at a time: ``value`` is the node of the captured graph that gives them, ``layer`` as in ``Absence``.

    In ``Plan.slices``, a parameter, ``value`` its first dotted name, that is gathered, multiplied, reduced and updated
    a run of rows at a time: each slice is a parameter of the captured graph, with a bucket of its own:
    ``"layers.0.mlp.up.weight[0:2048]"``.

    ``num_bytes`` are those of the whole tensor, of a parameter in the compute dtype.
    """

    value: str
    num_tiles: int
    num_bytes: int
    reason: str
    layer: str = field(default="", metadata=ONLY_IF_SET)
    over: Literal["rows", "classes"] = field(default="rows", metadata=ONLY_IF_SET)


@dataclass(frozen=True)
class ShardingDecision:
    """Sharding rule and placements of a node of the captured graph on the model axis.

    ``outputs`` and ``inputs`` are placements of its results and of its tensor arguments, as
    ``scheduler/plan/placements.py`` writes them; a ``parameter``, which is said by its name, has an output alone.
    ``again`` are the placements of its value, the first of several, that are made for forward's readers, and once more
    for backward's. ``has_no_way``: nothing of it can be shared, so that every rank has, or does, all of it.
    ``num_rounds``: in how many rounds ranks send each other its rows. ``num_copies``: the number of experts, those with
    the most rows, whose rows are computed on all ranks.
    """

    node: str
    outputs: tuple[str | None, ...]
    inputs: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    parameter: str = ""
    has_no_way: bool = False
    reason: str = ""
    num_rounds: int = 1
    num_copies: int = field(default=0, metadata=ONLY_IF_SET)

    @property
    def sends_rows(self) -> bool:
        """True if it is about rows of experts that ranks send each other, for which each has room for some."""
        return any("*" in (text or "") for text in (*self.outputs, *self.inputs))


MovedNodes = tuple[str, ...]
"""Nodes of one rank's graph that stand, in this order, right in front of the last of them rather than where they were
captured, so that collectives on values overlap with computation."""


Factor = Literal["input", "weight", "gradient"]


@dataclass(frozen=True)
class ProductDecision:
    """A matrix product of the captured graph with a ``weight``, or for its gradient: whether its factors are fp8.

    ``left`` and ``right`` say what the factors of ``node`` are: (input, weight) gives a layer's output, (gradient,
    weight) the gradient of its input, and an input and a gradient that of its weight. ``seconds`` are what it takes
    less in fp8, casts included: those that several products read in equal parts.
    """

    node: str
    weight: str
    left: Factor
    right: Factor
    in_fp8: bool
    reason: str
    seconds: float = 0.0

    @property
    def gives(self) -> str:
        """The product's result, in words."""
        factors = {self.left, self.right}
        return next(what for what, given in _RESULTS.items() if given == factors)


_RESULTS: Mapping[str, set[str]] = {
    "output": {"input", "weight"},
    "input gradient": {"gradient", "weight"},
    "weight gradient": {"input", "gradient"},
}


@dataclass(frozen=True)
class PieceDecision:
    """A piece of what is outside repeated layers, whose values are decided about together as those of a layer are.

    It goes from the node ``first`` of the captured graph to ``last`` in forward, and from ``back_first`` to
    ``back_last`` in backward (None: backward reads nothing that only the piece makes). ``values`` are those that do not
    stay on the device in between: where there are some, regions end at the piece's borders.
    """

    name: str
    first: str
    last: str
    back_first: str | None
    back_last: str | None
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class WireDecision:
    """Encodings of a bucket's collectives, if the user allows inexact results.

    ``gather`` and ``reduce`` are ``"exact"`` or in ``zerofx.ir.op_kernels.quantise.ENCODINGS``; nothing is gathered in
    ``"int4"``. With ``second_shard`` each rank keeps the part of the first gathered bucket that is its own among the
    ranks of its node, and later gathers stay on the node. A reduction that is not exact, on several nodes of several
    ranks, is a hop within nodes and one across: the second begins after the node ``hop_after`` of the captured graph
    (None: where the bucket is updated).
    """

    bucket: int
    gather: str
    second_shard: bool
    reduce: str
    reason: str
    hop_after: str | None = None

    @property
    def is_exact(self) -> bool:
        """True if the bucket is sent unchanged."""
        return self.gather == "exact" and not self.second_shard and self.reduce == "exact"


D = TypeVar("D", GatherDecision, ReduceDecision, Absence, WireDecision)


def bucket_decisions(decisions: Iterable[D], bucket: int) -> list[D]:
    """The decisions about one bucket: of most kinds, one or none."""
    return [decision for decision in decisions if decision.bucket == bucket]
