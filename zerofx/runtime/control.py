"""Agreement between ranks outside the step: small objects over a gloo group of its own, always within a timeout."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerofx.errors import RankMismatchError


class Control:
    """The side channel on which ranks compare and share plans. For a world of one it does nothing."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = None
        if self.num_ranks > 1:
            assert group is not None
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, backend="gloo", timeout=self._timeout)

    def meet(self, purpose: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks, for ``timeout_seconds`` or else the channel's own timeout.

        Raises:
            RankMismatchError: not all came in time; names those that did not (on the rank that knows: rank 0).
        """
        if self._group is None:
            return
        timeout = timedelta(seconds=timeout_seconds) if timeout_seconds is not None else self._timeout
        try:
            dist.monitored_barrier(self._group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RankMismatchError(
                f"expected all {self.num_ranks} ranks to {purpose} within {timeout.total_seconds():.0f} s, but "
                f"some did not come (rank {self.rank} did). Every rank must call the same things in the same order, "
                f"with batches of the same shapes. {_first_line(error)}"
            ) from error

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self._group is None:
            return [value]
        self.meet(purpose)
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank_0(self, value: Any, purpose: str) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        self.meet(purpose)
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def divide(self, items: list[str]) -> tuple[list[str], list[str]]:
        """This rank's share of ``items`` among the ranks of its host, and the rest: for work whose results the ranks of
        a host share through a cache."""
        hosts = self.gather(socket.gethostname(), "divide work")
        local = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        share = local.index(self.rank)
        mine = items[share :: len(local)]
        return mine, [item for item in items if item not in mine]

    def agree(self, value: str, what: str, purpose: str, hint: str) -> None:
        """Check that all ranks have the same ``value``.

        Raises:
            RankMismatchError: names the ranks that differ from rank 0, and shows one of the differing values.
        """
        check_equal(self.gather(value, purpose), what, hint)


def check_equal(values: Sequence[Any], what: str, hint: str) -> None:
    """Raise a ``RankMismatchError``, the same on all ranks, unless all ``values`` (by rank) are equal."""
    different = [rank for rank, value in enumerate(values) if value != values[0]]
    if different:
        raise RankMismatchError(
            f"expected the same {what} on every rank, found another on rank{'s' if len(different) > 1 else ''} "
            f"{', '.join(map(str, different))}:\n  rank 0: {values[0]}\n  rank {different[0]}: {values[different[0]]}\n{hint}"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
