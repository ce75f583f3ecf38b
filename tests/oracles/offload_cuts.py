"""Which model states to place on the host: cuts of a mixed-precision step's data-flow graph (ZeRO-Offload, 2101.06840).

Data and operators of a step are divided between device and host; what flows from one to the other crosses the link. A
step reads and writes, in bytes per parameter:

    parameters 2 -> forward         gradients 2 ---> update <-> master 4, momentum 4, variance 4
    parameters 2 -> backward -> gradients            update -> cast 4 -> parameters 2

Forward and backward stay on the device: their work grows with the batch, a host's would dwarf the link. All other
divisions are enumerated; few are worth having (``best_cuts``), and ``place`` chooses among those for a machine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.units import format_bytes, format_count

# Bytes per parameter that each kind of data holds, and that flow along each edge in one step.
STATE_BYTES = {"parameters": 2, "gradients": 2, "master": 4, "momentum": 4, "variance": 4}
_MOVABLE_OPERATORS = ("update", "cast")
_FLOWS = (
    ("parameters", "forward", 2),
    ("parameters", "backward", 2),
    ("backward", "gradients", 2),
    ("gradients", "update", 2),
    *((state, "update", 4) for state in ("master", "momentum", "variance")),
    *(("update", state, 4) for state in ("master", "momentum", "variance")),
    ("update", "cast", 4),
    ("cast", "parameters", 2),
)
_UPDATE_FLOPS = 14  # Adam, per parameter: as scheduler/cost/roofline.py counts
_UPDATE_BYTES = 28  # gradients, master and moments read; master, moments and parameters written


@dataclass(frozen=True)
class Cut:
    """What is ``on_host`` (kinds of data, ``"update"``, ``"cast"``), and per parameter: bytes left on the device, bytes
    that go to the host and come back in a step."""

    on_host: frozenset[str]
    device_bytes: int
    down_bytes: int
    up_bytes: int

    @property
    def link_bytes(self) -> int:
        return self.down_bytes + self.up_bytes


@dataclass(frozen=True)
class StateLevel:
    """A cut for a number of ranks on a machine: bytes on each rank's device and share of the host, and what the update
    and its copies take, nothing of it overlapped."""

    cut: Cut
    device_bytes: int
    host_bytes: int
    update_seconds: float


def cuts() -> tuple[Cut, ...]:
    """All divisions of data and movable operators between device and host."""
    names = (*STATE_BYTES, *_MOVABLE_OPERATORS)
    subsets = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
    return tuple(_cut(frozenset(subset)) for subset in subsets)


def best_cuts() -> tuple[Cut, ...]:
    """The cuts that no other beats in both bytes on the device and bytes on the link; the least traffic first."""
    found: list[Cut] = []
    for cut in sorted(cuts(), key=lambda c: (c.link_bytes, c.device_bytes, len(c.on_host))):
        if not found or cut.device_bytes < found[-1].device_bytes:
            found.append(cut)
    return tuple(found)


def place(num_parameters: int, num_ranks: int, machine: Machine, *, other_bytes: int = 0) -> StateLevel:
    """The fastest placement that fits, when gradients and states are divided over the ranks (ZeRO stage 2).

    Parameters stay on every device whole. The more ranks there are, the less of the states a device holds, and from
    some number on nothing is gained by the host.

    Args:
        num_parameters: of the model.
        num_ranks: data-parallel ranks.
        machine: one rank's device and host.
        other_bytes: what else the device holds, such as activations.

    Raises:
        MemoryBudgetError: no placement fits.
        UsageError: there are no parameters or no ranks.
    """
    if num_parameters < 1 or num_ranks < 1:
        raise UsageError(f"expected parameters and ranks, found {num_parameters} and {num_ranks}")
    machine = machine.for_ranks(num_ranks)
    candidates = [_place(cut, num_parameters, num_ranks, machine) for cut in cuts() if "parameters" not in cut.on_host]
    room = machine.device.memory_bytes - other_bytes
    fitting = [p for p in candidates if p.device_bytes <= room and p.host_bytes <= machine.host_bytes_per_rank]
    if not fitting:
        least = min(p.device_bytes for p in candidates)
        raise MemoryBudgetError(
            f"expected {format_count(num_parameters)} parameters on {num_ranks} x {machine.name} to fit, found that "
            f"the least on a device is {format_bytes(least)} of {format_bytes(max(0, room))}, with the rest in the "
            f"{format_bytes(machine.host_bytes_per_rank)} of its host: shard the parameters too (stage 3)"
        )
    return min(fitting, key=lambda p: (p.update_seconds, p.device_bytes, len(p.cut.on_host)))


def _cut(on_host: frozenset[str]) -> Cut:
    device = sum(size for name, size in STATE_BYTES.items() if name not in on_host)
    down = sum(size for source, target, size in _FLOWS if target in on_host and source not in on_host)
    up = sum(size for source, target, size in _FLOWS if source in on_host and target not in on_host)
    return Cut(on_host, device, down, up)


def _place(cut: Cut, num_parameters: int, num_ranks: int, machine: Machine) -> StateLevel:
    slice_ = -(-num_parameters // num_ranks)
    whole = STATE_BYTES["parameters"]
    traffic = _UPDATE_BYTES * slice_
    if "update" in cut.on_host:
        seconds = machine.host_seconds(_UPDATE_FLOPS * slice_, traffic)
    else:
        seconds = traffic / machine.memory_bandwidth
    if cut.on_host:
        seconds += copy_seconds(cut.down_bytes * slice_, "device", "host", machine)
        seconds += copy_seconds(cut.up_bytes * slice_, "host", "device", machine)
    return StateLevel(
        cut,
        device_bytes=whole * num_parameters + (cut.device_bytes - whole) * slice_,
        host_bytes=(sum(STATE_BYTES.values()) - cut.device_bytes) * slice_,
        update_seconds=seconds,
    )
