"""What every way to move tensors between ranks can do: gather, reduce, exchange and broadcast."""

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


class LostRankError(RankMismatchError):
    """A rank did not come in time to where tensors are moved, or is gone: ``rank 1 did not come in time``."""


@dataclass
class Pending(Generic[T]):
    """Something started: its result (valid once awaited), and what finishes it, given the buffer that it reads.

    ``kind`` and ``bucket`` say what it is, where it is a collective of a step's.
    """

    result: T
    finish: Callable[[Any], T]
    kind: str = ""
    bucket: int = -1

    @staticmethod
    def after(result: T, *waits: Callable[[], object]) -> Pending[T]:
        """A result that is valid once each of ``waits`` has returned."""

        def finish(_source: object) -> T:
            for wait in waits:
                wait()
            return result

        return Pending(result, finish)


def members_of(group: Group, rank: int, size: int, num_ranks: int) -> list[int]:
    """The ranks of the group that ``rank`` is in, in order.

    ``"all"`` ranks; the ``size`` ranks of its ``"node"``, which are consecutive; or the ``size`` ranks ``"across"``
    nodes that have its place there.
    """
    if group == "node":
        first = rank // size * size
        return list(range(first, first + size))
    return list(range(rank % (num_ranks // size), num_ranks, num_ranks // size))


class Transport(Protocol):
    """Moves slices between the ranks of a group, this one number ``rank`` of ``num_ranks``.

    ``sent_to`` counts what this rank has sent to each other, by its number among all ranks, payload only. ``stream`` is
    what its collectives are noted as, where a step is measured.
    """

    rank: int
    num_ranks: int
    sent_to: Counter[int]
    stream: str = COLLECTIVE
    notice: str = ""  # what makes it slower than it could be, and what to do
    breaks: bool = True  # whether who waits for a rank that fails, or is gone, fails at once

    def among(self, groups: Groups) -> Transport:
        """A transport between the ranks of this rank's group, to be closed before this one. Collective, of all ranks,
        with the same ``groups``."""
        ...

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]: ...

    def share(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's slice where other ranks may read it in place, if they can; otherwise ``shard`` itself.

        Every rank calls it, with slices of one size.
        """
        return shard

    def read_in_place(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor | None:
        """The slices of all ranks where they lie, in order, if ``shard`` is what ``share`` has put next to the others'.

        ``full`` is the buffer that they would be gathered into. It is held for as long as what is returned: memory that
        is planned for is taken, whichever way a gather goes.
        """
        return None

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        """Gather several slices of one dtype as one collective."""

    def reduce_scatter(self, gradients: torch.Tensor, *, in_place: bool = False) -> Pending[torch.Tensor]:
        """The sum over all ranks of this rank's slice; ``in_place``: where that lies in ``gradients``."""

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        """Gather the parts of the ``size`` ranks of this node."""

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        """Send part i of ``size`` equal parts to the group's rank i; the result has the parts received, in order."""

    def shift(self, value: torch.Tensor) -> Pending[torch.Tensor]:
        """Send a tensor to the next rank, the last one's to the first; the result is that of the rank before."""

    def all_reduce(self, value: torch.Tensor, reduction: str) -> Pending[torch.Tensor]:
        """The sum over all ranks, or the ``"max"`` or ``"min"`` elements, in a tensor of its own.

        On CPUs what ranks have is added up in their order, on GPUs in NCCL's.
        """

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors by rank 0's, which have the same shapes and strides.

        Collectives move memory as it lies: a tensor with holes goes by way of a copy, which no plan counts.
        """
        stored = [_in_memory_order(tensor) for tensor in tensors if tensor.numel()]
        dense = [tensor.contiguous() for tensor in stored]
        self.broadcast_dense([tensor.view(-1) for tensor in dense])
        for tensor, sent in zip(stored, dense, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)

    def broadcast_dense(self, tensors: Sequence[torch.Tensor]) -> None:
        """``broadcast`` of flat tensors."""

    def all_true(self, here: bool) -> bool:
        """Whether all ranks say so. An agreement, which is not counted as sent."""
        ...

    def settle(self) -> None:
        """Block until all that has been started is done, where a step is left on all ranks at one place."""

    def check_reachable(self) -> None:
        """Look, without waiting, whether a rank is known to have failed: what has arrived since is not what was sent.

        Raises:
            LostRankError: one has.
        """
        return

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent, payload only."""
        return self.sent_to.total()

    def abort(self) -> None:
        """After a step that failed here: let ranks that wait for this one fail. Nothing can be moved after it."""

    def close(self) -> None:
        """After the last collective of all ranks: end its threads, and destroy the process groups that it has made."""


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements come in the order in which they lie, each once where dimensions are expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
