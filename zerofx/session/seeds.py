"""Torch's random generators on several ranks: alike where ranks share a computation, and otherwise better not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from zerofx.checkpoints.random_states import random_states, set_random_states
from zerofx.errors import warn
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.mesh import TOGETHER, Mesh, batch_number


def digest_of_states(device: torch.device) -> bytes:
    """16 bytes that tell states of the generators of the CPU and of ``device`` apart."""
    digest = xxhash.xxh3_128()
    for state in random_states(device).values():
        digest.update(state.numpy().tobytes())
    return digest.digest()


class SeedWatch:
    """Looks at torch's generators before each step.

    Ranks that share a computation, on the axes model and pipe, draw from one state: where it is another on some, all go
    on from that of the group's first rank. It warns on rank 0 where it had to see to that, and where the first step
    draws the same in all groups.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._watches_first = control.num_ranks > 1
        self._groups: Sequence[Sequence[int]] = ()
        self._number = "rank"
        self._before = b""
        self._are_alike = self._has_told = False

    def digest(self, device: torch.device, mesh: Mesh) -> bytes:
        """A digest of this rank's generators, to compare before a step on ``mesh``: 16 bytes, zeros for nothing."""
        return digest_of_states(device) if self._watches_first or mesh.num_together > 1 else bytes(16)

    def begin(
        self, device: torch.device, mesh: Mesh, agreed: Callable[[], Sequence[bytes]], *, draws_together: bool
    ) -> None:
        """Before a step on ``mesh``. Collective where it draws and ranks share it, and before the first.

        ``agreed`` gives every rank's ``digest``. ``draws_together``: whether ranks that share the step draw in it.
        """
        if not draws_together and not self._watches_first:
            return
        digests, self._groups, self._number = agreed(), mesh.groups(TOGETHER), batch_number(mesh)
        self._watches_first &= len(self._groups) > 1
        if draws_together and any(len({digests[rank] for rank in group}) > 1 for group in self._groups):
            self._align(device)
        if self._watches_first:
            self._before = digest_of_states(device)
            self._are_alike = len({digests[group[0]] for group in self._groups}) == 1

    def _align(self, device: torch.device) -> None:
        rank = self._control.rank
        (own,) = (group for group in self._groups if rank in group)
        states = self._control.gather(random_states(device) if rank == own[0] else None, "draw alike")
        set_random_states(states[own[0]], device)
        if rank == 0 and not self._has_told:
            warn(
                f"ranks that share one computation had torch's random generators in other states: all go on from that "
                f"of the first of them, to draw alike what all of them have (rank 0's on ranks "
                f"{', '.join(map(str, self._groups[0]))}). {self._advice()}, or let this be"
            )
        self._has_told = True

    def end(self, device: torch.device) -> None:
        """After a step."""
        if not self._watches_first:
            return
        self._watches_first = False
        if self._are_alike and self._control.rank == 0 and digest_of_states(device) != self._before:
            warn(
                f"all {self._control.num_ranks} ranks draw the same random numbers: expected torch's generators to "
                f"differ by rank before the first step, which draws (a dropout's mask, say), found the same state on "
                f"all. Masks are then the same on every rank, as they are under DistributedDataParallel: "
                f"{self._advice()[0].lower()}{self._advice()[1:]} once the model is built, or let this be if it is "
                f"meant"
            )

    def _advice(self) -> str:
        return f"Call torch.manual_seed(seed + {self._number})"
