"""Links as they were measured: what collectives and copies between tiers have taken, as latency and bandwidth.

Every transfer of a step takes ``latency + bytes / bandwidth`` in the machine's model. From transfers of different sizes
both are found by least squares of the relative errors, so that small transfers count as much as large ones. Where all
are of about one size the two cannot be told apart: both are then off by the same factor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerofx.errors import PlanError
from zerofx.ir.streams import LINKS, NVME_READ, NVME_WRITE, TO_DEVICE, TO_HOST, axes_of_stream
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.transfers import collective_latency, collective_seconds, copy_seconds, wire_bytes
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.mesh import Mesh

_APART = 2.0  # sizes differ enough to tell latency from bandwidth if the largest is as many times the smallest
_PROBE_BYTES = 1 << 30
_COPIES: Mapping[str, tuple[Tier, Tier]] = {
    TO_HOST: ("device", "host"),
    TO_DEVICE: ("host", "device"),
    NVME_READ: ("nvme", "host"),
    NVME_WRITE: ("host", "nvme"),
}


class Transfer(NamedTuple):
    """Bytes that one rank has sent in a collective, or copied between tiers, and the seconds that this took."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    """One transfer of n bytes takes ``latency + n * seconds_per_byte`` seconds."""

    latency: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.seconds_per_byte < math.inf):
            raise PlanError(f"expected a latency and seconds per byte that are finite and positive, found {self}")

    def seconds(self, num_bytes: int) -> float:
        return self.latency + num_bytes * self.seconds_per_byte


def predict_link(stream: str, machine: Machine, mesh: Mesh) -> MeasuredLink | None:
    """The link that ``machine`` has for a stream; None where it has none, or the mesh no such ranks."""
    axes = axes_of_stream(stream)
    if axes is not None:
        num_ranks, local = mesh.size(axes), mesh.num_on_node(axes, machine.ranks_per_node)
        if num_ranks < 2:
            return None
        latency = collective_latency("all_gather", num_ranks, machine, ranks_on_node=local)
        seconds = collective_seconds("all_gather", _PROBE_BYTES, num_ranks, machine, ranks_on_node=local)
        return MeasuredLink(latency, (seconds - latency) / wire_bytes("all_gather", _PROBE_BYTES, num_ranks))
    if stream not in LINKS or (machine.nvme is None and stream in (NVME_READ, NVME_WRITE)):
        return None
    source, destination = _COPIES[stream]
    latency = copy_seconds(0, source, destination, machine)
    seconds = copy_seconds(_PROBE_BYTES, source, destination, machine)
    return MeasuredLink(latency, (seconds - latency) / _PROBE_BYTES)


def fit_links(transfers: Mapping[str, Iterable[Transfer]], machine: Machine, mesh: Mesh) -> dict[str, MeasuredLink]:
    """Links fitted to the transfers of each stream that ``machine`` has; streams without transfers are left out."""
    links = {}
    for stream, of_stream in transfers.items():
        predicted = predict_link(stream, machine, mesh)
        sizes: dict[int, list[float]] = {}
        for num_bytes, seconds in of_stream:
            if num_bytes > 0 and seconds > 0:
                sizes.setdefault(num_bytes, []).append(seconds)
        if predicted is not None and sizes:
            samples = [(size, statistics.median(taken), len(taken)) for size, taken in sorted(sizes.items())]
            links[stream] = fit_link(samples, predicted)
    return dict(sorted(links.items()))


def fit_link(samples: Sequence[tuple[int, float, int]], predicted: MeasuredLink) -> MeasuredLink:
    """The link that explains ``samples``: bytes in increasing order, seconds, and how many transfers took them."""
    if samples[-1][0] < _APART * samples[0][0]:
        factor = sum(n * t for _, t, n in samples) / sum(n * predicted.seconds(x) for x, _, n in samples)
        return MeasuredLink(predicted.latency * factor, predicted.seconds_per_byte * factor)
    # Least squares of (latency + bytes * per_byte) / seconds = 1: for each transfer 1 / seconds and bytes / seconds.
    a = sum(n / t**2 for _, t, n in samples)
    b = sum(n * x / t**2 for x, t, n in samples)
    c = sum(n * x**2 / t**2 for x, t, n in samples)
    d = sum(n / t for _, t, n in samples)
    e = sum(n * x / t for x, t, n in samples)
    determinant = a * c - b * b
    latency, per_byte = (c * d - b * e) / determinant, (a * e - b * d) / determinant
    if per_byte <= 0:  # larger transfers took no longer: all is latency, and bytes as fast as the machine says
        return MeasuredLink(max(0.0, d / a - predicted.seconds_per_byte * b / a), predicted.seconds_per_byte)
    return MeasuredLink(latency, per_byte) if latency >= 0 else MeasuredLink(0.0, e / c)


@dataclass(frozen=True)
class _Ring:
    """Collectives along some axes, as measured and as predicted; ``crosses``: whether their groups leave a node."""

    measured: MeasuredLink
    predicted: MeasuredLink
    num_ranks: int
    crosses: bool


def correct_machine(machine: Machine, links: Mapping[str, MeasuredLink], mesh: Mesh) -> Machine:
    """``machine`` with links that take, for transfers between the ranks of ``mesh``, what was measured."""
    rings = []
    for stream, measured in links.items():
        predicted, axes = predict_link(stream, machine, mesh), axes_of_stream(stream)
        if predicted is None:
            continue
        if axes is not None:
            crosses = mesh.num_on_node(axes, machine.ranks_per_node) < mesh.size(axes)
            rings.append(_Ring(measured, predicted, mesh.size(axes), crosses))
        elif stream in (TO_HOST, TO_DEVICE):
            machine = _correct_host_link(machine, stream, measured)
        else:
            assert machine.nvme is not None
            drive, nvme = Link(machine.ranks_per_node / measured.seconds_per_byte, measured.latency), machine.nvme
            nvme = replace(nvme, read=drive) if stream == NVME_READ else replace(nvme, write=drive)
            machine = replace(machine, nvme=nvme)
    return _correct_by_rings(machine, rings) if rings else machine


def _correct_by_rings(machine: Machine, rings: Sequence[_Ring]) -> Machine:
    """Links within a node are off by as much as the collectives that stay there, and links between nodes by as much as
    those that cross them, on average. Where there are no such collectives, both are off by the same factor."""

    def correct_link(link: Link, *, crosses: bool) -> Link:
        of_kind = [ring for ring in rings if ring.crosses == crosses] or rings
        slower = statistics.fmean(ring.measured.seconds_per_byte / ring.predicted.seconds_per_byte for ring in of_kind)
        latencies = (
            # Where the machine says nothing of hops they are alike.
            link.latency * ring.measured.latency / ring.predicted.latency
            if ring.predicted.latency
            else ring.measured.latency / (ring.num_ranks - 1)
            for ring in of_kind
        )
        return Link(link.bandwidth / slower, statistics.fmean(latencies))

    within, between = correct_link(machine.intra_node, crosses=False), correct_link(machine.inter_node, crosses=True)
    return replace(machine, intra_node=within, inter_node=between)


def _correct_host_link(machine: Machine, stream: str, measured: MeasuredLink) -> Machine:
    rate = 1.0 / measured.seconds_per_byte
    link = Link(rate / machine.efficiency.link, measured.latency)
    # A copy that is faster than one rank's share of the host's memory shows that the memory is faster.
    least = rate * machine.ranks_per_node / machine.efficiency.memory
    host = replace(machine.host, memory_bandwidth=max(machine.host.memory_bandwidth, least))
    return replace(machine, host=replace(host, to_host=link) if stream == TO_HOST else replace(host, to_device=link))
