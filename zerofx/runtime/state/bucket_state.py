"""The state of one bucket on a rank between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.ir.facts import DEVICE, Role
from zerofx.ir.owners import Owners
from zerofx.optimizers.whole import OwnedStates
from zerofx.runtime.tiers.stored import Stored
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.torch_private.tensors import version_of


@dataclass
class BucketState:
    """One bucket's tensors on this rank.

    ``full`` ([numel], compute dtype) stays on the device at stages 0 to 2. ``shard`` ([shard_numel], compute dtype) is
    this rank's slice, at stages 1 and 2 a view of ``full``; ``tier`` is where it lives. ``part`` ([part_numel]), where
    the optimizer updates a part of a slice, is a view of that part. ``master`` holds the stored
    values where their dtype is another, or where the update runs on the host and ``shard`` is not in a slower tier.
    ``flat`` and ``scalars`` are the optimizer's states; ``present`` names those that have their values. ``scalars`` are
    replaced, never changed: buckets that are updated alike have the same. ``decision``
    says in which tier ``master`` and ``flat`` are; None is the device. ``delayed`` is what a delayed update hands over
    from one step to the next, by the names that ``Role.DELAYED`` has. ``owned``: of what this rank owns of a bucket
    whose update needs whole parameters, the states but for their tensors, which ``flat`` has as one buffer of bytes.
    ``master_owners``: those that have ``master`` whole, each what it owns; None where it is as ``low``.
    """

    full: torch.Tensor | None
    shard: torch.Tensor | Stored | None
    master: torch.Tensor | Stored | None
    tier: Tier = DEVICE
    decision: Absence | None = None
    flat: dict[str, torch.Tensor | Stored] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    delayed: dict[str, Stored] = field(default_factory=dict)
    part: torch.Tensor | None = None
    owned: OwnedStates = field(default_factory=OwnedStates)
    master_owners: Owners | None = None

    def forget(self) -> None:
        """Let go of the optimizer's states, which then begin as they did before the first step."""
        self.flat.clear()
        self.scalars = {}
        self.present = frozenset()
        self.owned.clear()

    @property
    def entries(self) -> Mapping[str, Any]:
        """States of parameters that are updated whole which have no place yet, by name."""
        return self.owned.waiting

    @property
    def low(self) -> torch.Tensor | Stored:
        """The values that this rank updates, in the compute dtype: a slice, or a part of one, or the whole bucket at
        stage 0."""
        values = next((values for values in (self.part, self.shard, self.full) if values is not None), None)
        assert values is not None
        return values

    @property
    def stored(self) -> torch.Tensor | Stored:
        """The values that the optimizer updates in the stored dtype: as ``low`` has them, or whole at their owners."""
        return self.master if self.master is not None else self.low

    @property
    def version(self) -> int:
        """Another number than before if the bucket has been updated since, or its delayed update has been started."""
        if self.delayed:
            assert isinstance(self.stored, Stored)
            return self.stored.num_writes
        if isinstance(self.stored, torch.Tensor) and self.master_owners is None:
            return version_of(self.stored)
        # New values of what other ranks own come to ``low`` alone.
        return version_of(self.low) if isinstance(self.low, torch.Tensor) else self.low.version

    def value(self, role: Role, name: str) -> Any:
        """The value of a placeholder of ``role``; ``name`` is that of a state."""
        match role:
            case Role.FULL:
                return self.full
            case Role.SHARD:
                return self.shard
            case Role.PART:
                return self.part
            case Role.MASTER:
                return self.master
            case Role.STATE:
                return self.flat[name]
            case Role.DELAYED:
                return self.delayed[name]
            case Role.SCALAR_STATE:
                return self.scalars[name]
            case _:
                raise AssertionError(f"a bucket has no {role}")
