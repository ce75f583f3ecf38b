"""Move tensors between ranks: the gather, reduce, exchange and broadcast of every transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from zerofx.errors import RankMismatchError
from zerofx.ir.streams import COLLECTIVE

T = TypeVar("T")

Group = Literal["all", "node", "across"]
Groups = Sequence[Sequence[int]]  # of ranks, each rank in one
Pieces = Sequence[tuple[int, torch.Tensor]]  # a rank of the group with a dense tensor, each


class LostRankError(RankMismatchError):
    """A rank did not come to a transfer in time, or is gone: ``rank 1 did not come in time``."""


@dataclass
class Pending(Generic[T]):
    """A started operation: its result (valid once awaited), and a function to finish it, given the buffer it reads.

    ``kind`` and ``bucket`` describe it, if it is a collective of a step's.
    """

    result: T
    finish: Callable[[Any], T]
    kind: str = ""
    bucket: int = -1

    @staticmethod
    def from_waits(result: T, *waits: Callable[[], object]) -> Pending[T]:
        """A result that is valid once each of ``waits`` has returned."""

        def finish(_source: object) -> T:
            for wait in waits:
                wait()
            return result

        return Pending(result, finish)


def copy_own_pieces(rank: int, sent: Pieces, into: Pieces) -> tuple[Pieces, Pieces]:
    """Copy what a rank sends to itself; returns the other pieces of both."""
    for (_, source), (_, target) in zip(
        (piece for piece in sent if piece[0] == rank), (piece for piece in into if piece[0] == rank), strict=True
    ):
        target.copy_(source)
    return [piece for piece in sent if piece[0] != rank], [piece for piece in into if piece[0] != rank]


def members_of(group: Group, rank: int, size: int, num_ranks: int) -> list[int]:
    """The ranks of the group that ``rank`` is in, in order.

    ``"all"`` ranks; the ``size`` consecutive ranks of its ``"node"``; or the ``size`` ranks ``"across"`` nodes that
    have its position there.
    """
    if group == "node":
        first = rank // size * size
        return list(range(first, first + size))
    return list(range(rank % (num_ranks // size), num_ranks, num_ranks // size))


class Transport(Protocol):
    """Moves slices between the ranks of a group, this one number ``rank`` of ``num_ranks``.

    ``sent_to`` counts the bytes of payload that this rank has sent to each other, by its number among all ranks.
    ``stream`` is the stream that its collectives are noted on, if a step is measured.
    """

    rank: int
    num_ranks: int
    sent_to: Counter[int]
    stream: str = COLLECTIVE
    notice: str = ""  # what makes it slower than it could be, and what to do
    breaks: bool = True  # whether who waits for a rank that fails, or is gone, fails at once

    def split(self, groups: Groups) -> Transport:
        """Make a transport between the ranks of this rank's group, to be closed before this one. Collective, of all
        ranks, with the same ``groups``."""
        ...

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]: ...

    def share(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's slice in memory that other ranks may read in place, if they can; otherwise ``shard`` itself.

        Every rank calls it, with slices of one size.
        """
        return shard

    def read_in_place(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor | None:
        """The slices of all ranks in place, in order, if ``shard`` is a result of ``share``.

        ``full`` is the buffer that they would be gathered into. It is held for as long as the result: planned memory is
        taken, whichever way a gather goes.
        """
        return None

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        """Gather several slices of one dtype as one collective."""

    def reduce_scatter(self, gradients: torch.Tensor, *, in_place: bool = False) -> Pending[torch.Tensor]:
        """The sum over all ranks of this rank's slice; ``in_place``: in its slice of ``gradients``."""

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        """Gather the parts of the ``size`` ranks of this node."""

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        """Send part i of ``size`` equal parts to the group's rank i; the result has the parts received, in order."""

    def exchange_pieces(self, result: torch.Tensor, sent: Pieces, into: Pieces, most: int) -> Pending[torch.Tensor]:
        """Send each tensor of ``sent`` to its rank, and receive each of ``into``, parts of ``result``, from its rank:
        those between two ranks in the same order on both, and ``most`` of them between any two. What a rank sends to
        itself is copied."""

    def open_links(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare for messages from the first rank of each pair to the second. Collective, of all ranks, with the same
        ``pairs``."""
        return

    def send(self, value: torch.Tensor, receiver: int) -> Pending[torch.Tensor]:
        """Start to send a flat tensor, held until the wait, to a rank of the group. That receives what this one sends
        in the order in which it is sent."""
        return self.exchange_pieces(value, [(receiver, value)], (), 1)

    def receive(self, into: torch.Tensor, sender: int) -> Pending[torch.Tensor]:
        """Start to receive a flat tensor that a rank of the group sends."""
        return self.exchange_pieces(into, (), [(sender, into)], 1)

    def shift(self, value: torch.Tensor) -> Pending[torch.Tensor]:
        """Send a tensor to the next rank, the last rank's to the first; the result is the previous rank's."""

    def all_reduce(self, value: torch.Tensor, reduction: str) -> Pending[torch.Tensor]:
        """The sum over all ranks, or the ``"max"`` or ``"min"`` elements, in a tensor of its own.

        On CPUs values are summed in rank order, on GPUs in NCCL's order.
        """

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's, which have the same shapes and strides.

        Collectives move memory in its own order: a tensor with holes is copied first, which no plan counts.
        """
        stored = [_permute_to_memory_order(tensor) for tensor in tensors if tensor.numel()]
        dense = [tensor.contiguous() for tensor in stored]
        self.broadcast_dense([tensor.view(-1) for tensor in dense])
        for tensor, sent in zip(stored, dense, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)

    def broadcast_dense(self, tensors: Sequence[torch.Tensor]) -> None:
        """``broadcast`` of flat tensors."""

    def all_true(self, here: bool) -> bool:
        """True if ``here`` is true on all ranks. An agreement, which is not counted as sent."""
        ...

    def settle(self) -> None:
        """Block until all started collectives are done, where a step is left on all ranks at one place."""

    def check_reachable(self) -> None:
        """Check, without waiting, that no rank is known to have failed: later data would not be what was sent.

        Raises:
            LostRankError: one has failed.
        """
        return

    @property
    def sent_bytes(self) -> int:
        """The bytes of payload that this rank has sent."""
        return self.sent_to.total()

    def abort(self) -> None:
        """Make ranks that wait for this one fail, after a step failed here. Nothing can be moved afterwards."""

    def close(self) -> None:
        """End its threads and destroy the process groups that it made, after the last collective of all ranks."""


def _permute_to_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the elements in memory order, each once if dimensions are expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
