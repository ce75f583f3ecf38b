"""A tensor in a slower tier: the block on the host, or the file, that its bytes are in, and until when they are its."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from zerofx.runtime.tiers.copies import Copy
from zerofx.runtime.tiers.nvme import NvmeFile
from zerofx.torch_private.tensors import version_of

P = TypeVar("P", torch.Tensor, NvmeFile)
Place: TypeAlias = "torch.Tensor | Stored"


class Lease(Generic[P]):
    """A block of the host, or a file, of which ``num_bytes`` are used: given back by ``end``, or with its last name."""

    def __init__(self, place: P, num_bytes: int, give_back: Callable[[P, int, Sequence[Copy]], None]) -> None:
        self.place: P = place
        self.num_bytes = num_bytes
        self._give_back: Callable[[P, int, Sequence[Copy]], None] | None = give_back
        self._copies: list[Copy] = []

    def used_by(self, copy: Copy) -> None:
        """``copy`` reads or writes the place, on CUDA perhaps still when the last name for it goes."""
        self._copies = [*(earlier for earlier in self._copies if earlier.is_busy), copy]

    def join(self) -> None:
        """Block until nothing reads or writes the place any more."""
        for copy in self._copies:
            copy.join()

    @property
    def users(self) -> Sequence[Copy]:
        """Copies, and updates on the host, that read or write the place."""
        return [copy for copy in self._copies if copy.is_busy]

    def end(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.place, self.num_bytes, self._copies)

    def __del__(self) -> None:
        self.end()


class Stored:
    """A tensor's bytes in a slower tier, there until the last name for it goes."""

    def __init__(self, like: torch.Tensor | Stored, lease: Lease[torch.Tensor] | Lease[NvmeFile]) -> None:
        self.shape: torch.Size = like.shape
        self.dtype: torch.dtype = like.dtype
        self.stride: tuple[int, ...] = like.stride() if isinstance(like, torch.Tensor) else like.stride
        self.lease: Lease[torch.Tensor] | Lease[NvmeFile] = lease
        self.landed: Callable[[], None] | None = None  # blocks until the host may read what was last written here
        self.updated: Future[None] | None = None  # the last update on the host that reads or writes it
        self.num_writes = 0  # copies over it, and updates of it on the host, that have been started

    @property
    def version(self) -> int:
        """Another number than before if anything has been written here since."""
        place = self.lease.place
        return self.num_writes + (version_of(place) if isinstance(place, torch.Tensor) else 0)

    @property
    def update_to_await(self) -> Callable[[], None] | None:
        """Blocks until the last update on the host that reads or writes it is done, and raises what went wrong there;
        None where there is nothing to wait for."""
        update = self.updated
        return None if update is None or (update.done() and update.exception() is None) else update.result

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself, on the host, once it is there. It must not outlive the ``Stored``."""
        if self.landed is not None:
            self.landed()
            self.landed = None
        return self.memory

    @property
    def memory(self) -> torch.Tensor:
        """The tensor's memory on the host, whatever is there by now."""
        place = self.lease.place
        assert isinstance(place, torch.Tensor), "what is in a file has to be copied to the host first"
        return place[: self.lease.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)


class Keeper(Protocol):
    """Keeps values that are about to be written over, as ``Snapshot`` does."""

    def keep(self, places: Sequence[object], *, in_place: bool) -> None: ...
    def end(self) -> None: ...
