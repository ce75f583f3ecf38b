"""Ranks that draw the same random numbers: torch's generators were seeded alike on all of them."""

from __future__ import annotations

import torch
import xxhash

from zerofx.checkpoints.random_states import random_states
from zerofx.errors import warn
from zerofx.runtime.comm.control import Control


class SeedWatch:
    """Looks at torch's generators around the first step, and warns on rank 0 if it draws the same on all ranks."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._is_over = control.num_ranks == 1
        self._before = ""
        self._are_alike = False

    def begin(self, device: torch.device) -> None:
        """Before a step. Collective before the first."""
        if self._is_over:
            return
        self._before = _digest(device)
        states = self._control.gather(self._before, "compare random generators")
        self._are_alike = all(state == self._before for state in states)

    def end(self, device: torch.device) -> None:
        """After a step."""
        if self._is_over:
            return
        self._is_over = True
        if self._are_alike and self._control.rank == 0 and _digest(device) != self._before:
            warn(
                f"all {self._control.num_ranks} ranks draw the same random numbers: expected torch's generators to "
                f"differ by rank before the first step, which draws (a dropout's mask, say), found the same state on "
                f"all. Masks are then the same on every rank, as they are under DistributedDataParallel: call "
                f"torch.manual_seed(seed + rank) once the model is built, or let this be if it is meant"
            )


def _digest(device: torch.device) -> str:
    digest = xxhash.xxh3_128()
    for state in random_states(device).values():
        digest.update(state.numpy().tobytes())
    return digest.hexdigest()
