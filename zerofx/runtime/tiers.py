"""Tensors in slower tiers: copied out and back beside computation, and counted.

Bytes are counted where the plan counts them: from the start of a copy, and until the last name for what is stored goes.
A copy to or from nvme passes through a block on the host. Everything is counted and given back on the thread that runs
the step; other threads only move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch

from zerofx.runtime.collectives import Pending
from zerofx.runtime.copies import Copies, CudaCopies, ThreadCopies
from zerofx.runtime.host_memory import HostMemory
from zerofx.runtime.nvme import NvmeFiles, check_folder
from zerofx.scheduler.storage import storage_bytes
from zerofx.scheduler.streams import LINKS, NVME_READ, NVME_WRITE, TO_DEVICE, TO_HOST

P = TypeVar("P", torch.Tensor, Path)
T = TypeVar("T")


class Lease(Generic[P]):
    """A block of the host, or a file, of which ``num_bytes`` are used: given back by ``end``, or with its last name."""

    def __init__(self, place: P, num_bytes: int, give_back: Callable[[P, int], None]) -> None:
        self.place: P = place
        self.num_bytes = num_bytes
        self._give_back: Callable[[P, int], None] | None = give_back

    def end(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.place, self.num_bytes)

    def __del__(self) -> None:
        self.end()


class Stored:
    """A tensor's bytes in a slower tier, there until the last name for it goes."""

    def __init__(self, like: torch.Tensor, lease: Lease[torch.Tensor] | Lease[Path]) -> None:
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype
        self.lease: Lease[torch.Tensor] | Lease[Path] = lease


class Tiers:
    """The tiers beyond one device. Nothing is allocated, and no thread started, before the first copy.

    ``moved_bytes`` counts what each stream has moved so far.
    """

    def __init__(self, device: torch.device, nvme_folder: Path | None) -> None:
        self._device = device
        self._nvme_folder = nvme_folder
        self._host = HostMemory(pinned=device.type == "cuda")
        self._copies: Copies | None = None
        self._files: NvmeFiles | None = None
        self._held = {"host": 0, "nvme": 0}
        self._peak = dict(self._held)
        self.moved_bytes = dict.fromkeys(LINKS, 0)

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes in each slower tier now."""
        return dict(self._held)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most bytes in each slower tier since ``reset_peak``."""
        return dict(self._peak)

    def reset_peak(self) -> None:
        self._peak = dict(self._held)

    def prepare(self, peak_bytes: Mapping[str, int], num_local_ranks: int) -> None:
        """Make ready for a step with these peaks by tier, on so many ranks that share a drive.

        Raises:
            UsageError: the step needs nvme, and there is no folder for it or not enough space in it.
        """
        needed = peak_bytes.get("nvme", 0)
        if needed:
            folder = check_folder(self._nvme_folder, max(0, needed - self._held["nvme"]) * num_local_ranks)
            self._files = self._files or NvmeFiles(folder)

    def offload(self, value: torch.Tensor, tier: str) -> Pending[Stored]:
        """Start copying ``value`` out to ``"host"`` or ``"nvme"``."""
        num_bytes = storage_bytes(value)
        block = self._block(num_bytes)
        copy = self._running().start(TO_HOST, _bytes_of(value), block.place[:num_bytes])
        self.moved_bytes[TO_HOST] += num_bytes
        if tier == "host":
            return _pending(Stored(value, block), copy.finish)
        file = self._file(num_bytes)
        written = self._connected().write(file.place, block.place, num_bytes, copy.landed)
        self.moved_bytes[NVME_WRITE] += num_bytes
        return _pending(Stored(value, file), copy.finish, written.result, block.end)

    def reload(self, stored: Stored) -> Pending[torch.Tensor]:
        """Start copying what is stored into a fresh tensor of the same strides on the device."""
        value = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=self._device)
        lease: Lease[torch.Tensor] | Lease[Path] = stored.lease
        num_bytes, place = lease.num_bytes, lease.place
        self.moved_bytes[TO_DEVICE] += num_bytes
        if isinstance(place, torch.Tensor):
            copy = self._running().start(TO_DEVICE, place[:num_bytes], _bytes_of(value))
            return _pending(value, copy.finish)
        block = self._block(num_bytes)
        read = self._connected().read(place, block.place, num_bytes)
        self.moved_bytes[NVME_READ] += num_bytes
        copy = self._running().start(TO_DEVICE, block.place[:num_bytes], _bytes_of(value), after=read.result)
        return _pending(value, copy.finish, block.end)

    def settle(self) -> None:
        """Block until nothing is under way: behind a step that failed."""
        if self._files is not None:
            self._files.settle()
        if self._copies is not None:
            self._copies.settle()

    def close(self) -> None:
        """End all threads, and give all memory and files back."""
        self.settle()
        if self._files is not None:
            self._files.close()
        if self._copies is not None:
            self._copies.close()
        self._host.clear()
        self._files = self._copies = None

    def _running(self) -> Copies:
        if self._copies is None:
            self._copies = CudaCopies(self._device) if self._device.type == "cuda" else ThreadCopies()
        return self._copies

    def _connected(self) -> NvmeFiles:
        assert self._files is not None, "a step that uses nvme has been prepared for"
        return self._files

    def _block(self, num_bytes: int) -> Lease[torch.Tensor]:
        self._count("host", num_bytes)
        return Lease(self._host.take(num_bytes), num_bytes, self._give_back_block)

    def _file(self, num_bytes: int) -> Lease[Path]:
        self._count("nvme", num_bytes)
        return Lease(self._connected().take(num_bytes), num_bytes, self._give_back_file)

    def _give_back_block(self, block: torch.Tensor, num_bytes: int) -> None:
        self._host.give_back(block)
        self._count("host", -num_bytes)

    def _give_back_file(self, path: Path, num_bytes: int) -> None:
        if self._files is not None:
            self._files.give_back(path, num_bytes)
        self._count("nvme", -num_bytes)

    def _count(self, tier: str, num_bytes: int) -> None:
        self._held[tier] += num_bytes
        self._peak[tier] = max(self._peak[tier], self._held[tier])


def _pending(result: T, *finish: Callable[[], object]) -> Pending[T]:
    def finish_all(_source: object) -> T:
        for one in finish:
            one()
        return result

    return Pending(result, finish_all)


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """All bytes from the first to the last element of ``value``, gaps included, as a flat uint8 view."""
    numel = storage_bytes(value) // value.element_size()
    return value.as_strided((numel,), (1,)).view(torch.uint8)
