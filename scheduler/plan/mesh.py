"""A mesh: the ranks of a step along four axes, and the groups that they form. Plain data.

Ranks are numbered from the innermost axis out: on ``Mesh(replicate=2, shard=4, model=8)`` ranks 0 to 7 are a ``model``
group, those with the same place there in ranks 0 to 31 a ``shard`` group. What communicates most is innermost, and lies
within a node where it fits; along ``pipe``, the outermost, ranks only hand values on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zerofx.errors import UsageError

Axis = Literal["pipe", "replicate", "shard", "model"]
Axes = tuple[Axis, ...]

AXES: Axes = ("pipe", "replicate", "shard", "model")  # outer to inner
SHARD: Axes = ("shard",)  # what one axis is called
MODEL: Axes = ("model",)
PIPE: Axes = ("pipe",)
TOGETHER: Axes = ("pipe", "model")  # along which ranks share one computation, and its samples
_MOST_RANKS = 2**24  # some hundred times the devices of the largest machines


@dataclass(frozen=True)
class Mesh:
    """Ranks along ``replicate`` (the same slices), ``shard`` (slices of one bucket), ``model`` (one computation) and
    ``pipe`` (stages of it, one after the other).

    Raises:
        UsageError: an axis has no rank, or there are more than any machine has.
    """

    replicate: int = 1
    shard: int = 1
    model: int = 1
    pipe: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(
                    f"expected a number of ranks, 1 or more, on the axis {axis!r} of a mesh, found {size!r}"
                )
        if self.num_ranks > _MOST_RANKS:
            raise UsageError(
                f"expected a mesh of at most {_MOST_RANKS:,} ranks, found one of 2**{self.num_ranks.bit_length() - 1} "
                f"or more"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks on all axes."""
        return self.size(AXES)

    @property
    def world(self) -> Axes:
        """The axes that all ranks lie along; ``("shard",)`` for one rank."""
        return self.collective_axes(AXES)

    def collective_axes(self, axes: Axes) -> Axes:
        """Those of ``axes`` with more than one rank, as collectives name them; ``("shard",)`` where none has."""
        return self.axes_in_use(axes) or SHARD

    def size(self, axes: Axes) -> int:
        """Ranks of a group along ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def num_samples(self, axes: Axes) -> int:
        """By how much a sum along ``axes`` is divided for an average: ranks along ``TOGETHER`` share their samples."""
        return self.size(tuple(axis for axis in axes if axis not in TOGETHER))

    @property
    def num_together(self) -> int:
        """Ranks that share one computation, and so one batch."""
        return self.size(TOGETHER)

    @property
    def num_batches(self) -> int:
        """The batches of all ranks."""
        return self.num_samples(AXES)

    @property
    def stage_axes(self) -> Axes:
        """The axes that the ranks of one stage lie along; ``("shard",)`` where a stage has one rank."""
        return self.collective_axes(AXES[1:])

    @property
    def first_of_stages(self) -> tuple[int, ...]:
        """The first rank of each stage, in order."""
        return tuple(members[0] for members in self.groups(self.stage_axes)[: self.pipe])

    def axes_in_use(self, axes: Axes) -> Axes:
        """Those of ``axes`` with more than one rank, outer to inner."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self, axis) > 1)

    def place(self, rank: int, axis: Axis) -> int:
        """A rank's number along an axis."""
        return rank // self._stride(axis) % self.size((axis,))

    def index(self, rank: int, axes: Axes) -> int:
        """A rank's number among those along ``axes``, the first of them counting most: its slice of what is cut along
        the first, each part of that along the second, and so on."""
        number = 0
        for axis in axes:
            number = number * self.size((axis,)) + self.place(rank, axis)
        return number

    def members(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """The ranks of the group along ``axes`` that ``rank`` is in, in order: those with its place on other axes."""
        first = rank - sum(self.place(rank, axis) * self._stride(axis) for axis in axes)
        ways = [range(0, self.size((axis,)) * self._stride(axis), self._stride(axis)) for axis in axes]
        return tuple(sorted(first + sum(steps) for steps in itertools.product(*ways)))

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axes``, in order; every rank is in one."""
        firsts = (rank for rank in range(self.num_ranks) if not any(self.place(rank, axis) for axis in axes))
        return tuple(self.members(rank, axes) for rank in firsts)

    def num_on_node(self, axes: Axes, ranks_per_node: int) -> int:
        """The number of ranks of the first group along ``axes`` that are on its first node."""
        return self.num_below(self.axes_in_use(axes), ranks_per_node)

    def fills_nodes(self, axes: Axes, ranks_per_node: int) -> bool:
        """True if every group along ``axes`` has the same number of ranks on each of its nodes."""
        local = self.num_on_node(axes, ranks_per_node)
        nodes = (Counter(rank // ranks_per_node for rank in members) for members in self.groups(axes))
        return all(number == local for of_group in nodes for number in of_group.values())

    def num_below(self, axes: Axes, limit: int) -> int:
        """The number of ranks of the first group along ``axes`` (outer to inner) with a number below ``limit``."""
        if limit <= 0 or not axes:
            return int(limit > 0)
        outer, *inner = axes
        # What is inside a place on an axis has lower numbers than the next place.
        whole = min(self.size((outer,)), limit // self._stride(outer))
        number = whole * self.size(tuple(inner))
        if whole < self.size((outer,)):
            number += self.num_below(tuple(inner), limit - whole * self._stride(outer))
        return number

    def _stride(self, axis: Axis) -> int:
        """By how much the numbers of neighbours along an axis differ."""
        return self.size(AXES[AXES.index(axis) + 1 :])

    @property
    def axes_text(self) -> str:
        """The mesh in words that say nothing of how many ranks there are on ``shard`` alone."""
        return "one axis" if self.world == SHARD else str(self)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size((axis,))}" for axis in self.world)


def batch_number(mesh: Mesh) -> str:
    """The number of a rank's batch among all, in the words of a program that knows its ``rank``."""
    within = "rank" if mesh.pipe == 1 else f"rank % {mesh.num_ranks // mesh.pipe}"
    return within if mesh.model == 1 else f"{within} // {mesh.model}"
