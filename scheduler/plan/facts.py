"""The facts of a plan besides its decisions: what it is made for, and what it leads to. Plain data."""

from __future__ import annotations

import typing
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from zerofx.json_format import ONLY_IF_SET
from zerofx.scheduler.plan.mesh import SHARD, Axes


@dataclass(frozen=True)
class Arena:
    """One pool of memory for what a step makes on the device, each at a planned offset: ``pool_bytes``.

    ``least_bytes`` are the most of what lies in it that are live at once: no pool can be smaller. ``outside_bytes`` is
    the most at once of what a step makes elsewhere: what it returns, and what operators allocate themselves, such as
    results and workspaces of libraries; ``outside`` names whose that is, with bytes by operator at that moment.
    """

    pool_bytes: int
    least_bytes: int
    outside_bytes: int
    outside: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All that a step takes besides what it holds throughout."""
        return self.pool_bytes + self.outside_bytes


@dataclass(frozen=True)
class Prediction:
    """Predictions for a plan, per rank: bytes by tier, seconds, bytes sent on the wire in one step, FLOPs.

    ``peak_bytes`` has the device and the slower tiers that the plan uses, ``peak_node`` is where the device's peak is
    reached, and ``peak_live`` what is live there, by category. ``link_bytes`` are moved between tiers in one step, by
    stream: ``to_host``, ``to_device``, ``nvme_read`` and ``nvme_write``.
    ``node_wire_bytes`` are what the ranks of the first node send together, ``"within"`` it and ``"across"`` nodes,
    where the plan was free to send less than exact values; empty elsewhere.
    ``least_seconds`` bounds the step from below: within the same budget, no choice of values to keep and to compute
    again takes less (``scheduler.search.bound``); None where nobody asked.
    ``idle_seconds``: those of the step in which a stage of the axis pipe has nothing to do; None for no stage.
    ``arena``: the pool that the device's peak has in the place of what is live, where the step has one.
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
    node_wire_bytes: dict[str, int] = field(default_factory=dict, metadata=ONLY_IF_SET)
    arena: Arena | None = field(default=None, metadata=ONLY_IF_SET)
    idle_seconds: float | None = field(default=None, metadata=ONLY_IF_SET)


@dataclass(frozen=True)
class BucketSummary:
    """Facts that identify a bucket in a plan: its name, elements and dtypes, and the axes that it is cut along
    (``zerofx/ir/buckets.py``).

    ``reduce_dtype``: of gradients on their way between ranks, None for ``compute_dtype``. ``state_dtype``: what
    optimizer states are stored in, None for what the optimizer has them in. ``lent``: another step trains it.
    ``owners``: of each of its parameters in order the rank along ``states_over`` that updates it whole, where its
    update needs that and slices are on several ranks.
    """

    name: str
    group: int | None
    num_parameters: int
    shard_numel: int
    dtype: str
    compute_dtype: str
    reduce_dtype: str | None = field(default=None, metadata=ONLY_IF_SET)
    state_dtype: str | None = field(default=None, metadata=ONLY_IF_SET)
    gathered_over: Axes = field(default=SHARD, metadata=ONLY_IF_SET)
    states_over: Axes = field(default=SHARD, metadata=ONLY_IF_SET)
    lent: bool = field(default=False, metadata=ONLY_IF_SET)
    owners: tuple[int, ...] = field(default=(), metadata=ONLY_IF_SET)


@dataclass(frozen=True)
class GraphSummary:
    """Facts about the captured graph from which a plan can tell how another one differs.

    ``placeholders`` are types by role and name (``"parameter head.weight"``: ``"float32[8, 4]"``), ``operators``
    numbers of calls by operator.
    """

    placeholders: dict[str, str]
    operators: dict[str, int]


def is_within(inner: str, outer: str) -> bool:
    """True if a dotted path is ``outer``, or inside it."""
    return inner == outer or inner.startswith(f"{outer}.")


def unit_of(layer: str, units: Collection[str]) -> str:
    """The unit whose dotted path is ``layer`` or a prefix of it, or ``""``; units do not nest."""
    while layer and layer not in units:
        layer = layer.rpartition(".")[0]
    return layer


Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = typing.get_args(Tier)  # the fastest first
