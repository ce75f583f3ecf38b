"""Levels of menus, and the ledger of bytes that slower tiers have left for what levels put there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.facts import Tier

NUM_BUFFERS = 3  # buckets whose states are on their way from and to nvme: read, updated, written back


@dataclass(frozen=True)
class Level:
    """One level of a menu: bytes on the device, seconds that count, and the tier of what is not on the device.

    ``stored_bytes`` are what it takes of its tier throughout. Of states, ``update`` is the side of the update,
    ``passing_bytes`` are what it takes of the host while the bucket is updated, ``waiting_bytes`` from the bucket's
    reduction to its update where gradients are clipped. ``parameter_bytes``, of what is stored, are the bucket's
    parameters, which an update on the host works on there: parameters that live in ``tier`` themselves are these.
    ``delayed_bytes`` are those that a delayed update frees on the device. Of gradients, ``each`` says that each
    micro-batch's are reduced, and computation waits ``exposed_seconds`` for that, whatever counts of it. Of
    activations, ``saved``, ``offloaded`` and ``spread`` are positions in ``Segment.values``: those that are kept, those
    of them that wait for backward in a slower tier, and those in parts on the ranks of the model axis;
    ``copy_seconds`` is what copies out and back take.
    """

    num_bytes: int
    seconds: float
    tier: Tier = "device"
    update: Tier = "device"
    stored_bytes: int = 0
    passing_bytes: int = 0
    waiting_bytes: int = 0
    parameter_bytes: int = 0
    delayed_bytes: int = 0
    each: bool = False
    exposed_seconds: float = 0.0
    saved: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()
    copy_seconds: float = 0.0


@dataclass
class Ledger:
    """Bytes that one rank has left of each slower tier; ``tiers``: where values may go, the first being filled first.

    What has to be there, such as states of a delayed update, may take more than there is: nothing is left then.
    """

    tiers: tuple[Tier, ...]
    left: dict[Tier, int]

    @staticmethod
    def of(machine: Machine, tiers: tuple[Tier, ...]) -> Ledger:
        """All that a rank has of a machine."""
        return Ledger(tiers, {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank})

    def copy(self) -> Ledger:
        """The same, to take from apart."""
        return replace(self, left=dict(self.left))

    def first(self, num_bytes: int, reserve: int = 0) -> Tier | None:
        """The first tier with so much left, besides ``reserve`` bytes on the host; None if there is none."""
        needed = {tier: num_bytes + (reserve if tier == "host" else 0) for tier in self.tiers}
        return next((tier for tier in self.tiers if self.left[tier] >= needed[tier]), None)

    def take(self, tier: Tier, num_bytes: int) -> None:
        """Take bytes of a tier, as far as they are there."""
        self.left[tier] = max(0, self.left[tier] - num_bytes)

    def place(self, ways: Iterable[Level], reserve: int = 0) -> Level | None:
        """The first of some levels that fits, with ``reserve`` bytes of the host kept free of what is stored, and its
        bytes taken, but for those that only pass; None if none fits."""
        for level in ways:
            on_host = NUM_BUFFERS * level.passing_bytes + level.waiting_bytes
            on_host += level.stored_bytes + reserve if level.tier == "host" else 0
            if self.left[level.tier] >= level.stored_bytes and self.left["host"] >= on_host:
                self._take_level(level)
                return level
        return None

    def take_levels(self, levels: Sequence[Level]) -> None:
        """Take what levels need, with the buffers of those that pass through the host one after the other."""
        for level in levels:
            self._take_level(level)
        self.take_buffers(levels)

    def take_buffers(self, levels: Iterable[Level]) -> None:
        """Take the buffers on the host of levels that ``place`` has given."""
        self.take("host", NUM_BUFFERS * max((level.passing_bytes for level in levels), default=0))

    def _take_level(self, level: Level) -> None:
        self.take(level.tier, level.stored_bytes)
        self.take("host", level.waiting_bytes)
