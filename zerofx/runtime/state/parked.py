"""Tensors that give their memory on the device back for a while: their bytes wait in a slower tier, their values are
refused (``held.py``), and they are the same objects, and views of each other, all along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.state.held import hide
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.torch_private.tensors import memory_of

S = TypeVar("S")
R = TypeVar("R")
_UNDER_WAY = 2  # copies to or from nvme at a time: each takes a block of the host's on its way


class Parked:
    """Tensors on the device, whose memory nothing else uses, in ``tier`` until ``restore``.

    Where one cannot be moved, all are as they were.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], tiers: Tiers, tier: str) -> None:
        self._tiers = tiers
        self._views: dict[int, list[torch.Tensor]] = {}
        for tensor in {id(tensor): tensor for tensor in tensors if tensor.numel()}.values():
            self._views.setdefault(memory_of(tensor), []).append(tensor)
        memory = [_whole_memory(views[0]) for views in self._views.values()]
        self._num_ahead = _UNDER_WAY if tier == "nvme" else len(memory)
        started: list[Stored] = []

        def start(whole: torch.Tensor) -> Pending[Stored]:
            copy = tiers.offload(whole, tier)
            started.append(copy.result)
            return copy

        try:
            self._stored = list(_run_ahead(memory, start, self._num_ahead))
        except BaseException:
            tiers.settle()
            for stored in started:  # which the error refers to
                stored.lease.end()
            raise
        self._places = [
            [(tensor.storage_offset(), tensor.shape, tensor.stride()) for tensor in views]
            for views in self._views.values()
        ]
        for tensor in (tensor for views in self._views.values() for tensor in views):
            hide(tensor, tensor.shape, tensor.device)

    def restore(self) -> None:
        """Bring all up: the same bytes, in memory that is theirs."""
        loaded = _run_ahead(self._stored, self._tiers.reload, self._num_ahead)
        for whole, views, places in zip(loaded, self._views.values(), self._places, strict=True):
            for tensor, (offset, shape, stride) in zip(views, places, strict=True):
                empty = torch.empty(0, dtype=tensor.dtype, device=whole.device)
                tensor.data = empty.set_(whole.untyped_storage(), offset, shape, stride)


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _run_ahead(sources: Sequence[S], start: Callable[[S], Pending[R]], num_ahead: int) -> Iterator[R]:
    """The results of copies of ``sources``, in order, of which so many are under way at a time."""
    pending = deque[tuple[S, Pending[R]]]()
    for source in sources:
        if len(pending) == num_ahead:
            earlier, copy = pending.popleft()
            yield copy.finish(earlier)
        pending.append((source, start(source)))
    for earlier, copy in pending:
        yield copy.finish(earlier)
