"""Tensors in slower tiers: copies out and back overlap with computation, and bytes are counted.

Bytes are counted where the plan counts them: from the start of a copy, and until the last name for what is stored goes.
A copy to or from nvme passes through a block on the host. Everything is counted and given back on the thread that runs
the step; other threads only move bytes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import TierError
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.facts import DEVICE
from zerofx.ir.streams import LINKS, NVME_READ, NVME_WRITE, TO_DEVICE, TO_HOST
from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.copies import Copies, Copy, CudaCopies, FutureCopy, ThreadCopies
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.runtime.tiers.nvme import NvmeFile, NvmeFiles
from zerofx.runtime.tiers.nvme_folders import check_folders
from zerofx.runtime.tiers.stored import Keeper, Lease, Place, Stored


class Tiers:
    """The tiers beyond ``device``. Nothing is allocated, and no thread started, before the first copy.

    ``moved_bytes`` counts what each stream has moved so far, and ``log`` notes when, where that is asked for.
    ``snapshot``, while there is one, keeps what is about to be written over.
    """

    def __init__(self, device: torch.device, nvme_folders: Sequence[Path], host_budget: int | None = None) -> None:
        self.device = device
        self._nvme_folders = tuple(nvme_folders)
        self._host = HostMemory(device.type == "cuda", host_budget)
        self.log = SpanLog()
        self._copies: Copies | None = None
        self._files: NvmeFiles | None = None
        self._host_thread: ThreadPoolExecutor | None = None
        self._updates: dict[int, Future[None]] = {}  # on the host, by bucket, until they are settled
        # Beyond the step that began it, by bucket and whether it goes back to its tier, likewise.
        self._running_on: dict[tuple[int, bool], _RunningOn] = {}
        self._held = {"host": 0, "nvme": 0}
        self._peak = dict(self._held)
        self.moved_bytes = dict.fromkeys(LINKS, 0)
        self.snapshot: Keeper | None = None

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes in each slower tier now."""
        return dict(self._held)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of the host's blocks, those that wait for reuse among them: at most the host budget."""
        return self._host.num_bytes

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
            there = self._files.file_bytes if self._files is not None else 0
            check_folders(self._nvme_folders, max(0, needed - there) * num_local_ranks)
            self._files = self._files or NvmeFiles(self._nvme_folders, self.log)
            self._files.reserve(needed)

    def offload(self, value: torch.Tensor, tier: str) -> Pending[Stored]:
        """Start copying ``value`` out to ``"host"`` or ``"nvme"``."""
        return self._start(Stored(value, self._lease(tier, storage_bytes(value))), value)

    def reload(self, stored: Stored, tier: str = DEVICE, fresh: torch.Tensor | None = None) -> Pending[Any]:
        """Start copying what is stored into a fresh tensor of the same strides on the device, or back to the host.

        ``fresh``: that tensor, where there is one.
        """
        if tier != DEVICE:
            return self._start(Stored(stored, self._lease(tier, stored.lease.num_bytes)), stored)
        if fresh is None:
            fresh = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=self.device)
        return self._start(fresh, stored)

    def copy_into(self, into: Place, source: Place) -> Pending[Any]:
        """Start copying ``source`` over ``into``, which is on another tier and has its shape and strides."""
        self.keep([into], in_place=False)
        if isinstance(into, Stored):
            into.num_writes += 1
        return self._start(into, source)

    def empty_stored(self, numel: int, dtype: torch.dtype, tier: str) -> Stored:
        """A flat tensor whose values are not defined yet."""
        like = torch.empty(numel, dtype=dtype, device="meta")
        return Stored(like, self._lease(tier, storage_bytes(like)))

    def keep(self, places: Sequence[object], *, in_place: bool) -> None:
        """Keep what the snapshot, if there is one, has of ``places``, which are about to be written over.

        ``in_place``: what writes there is to find the values there.
        """
        if self.snapshot is not None:
            self.snapshot.keep(places, in_place=in_place)

    def another(self, lease: Lease[torch.Tensor] | Lease[NvmeFile]) -> Lease[torch.Tensor] | Lease[NvmeFile]:
        """A block or file like that of ``lease``, whose bytes are not defined yet."""
        return self._lease("nvme" if isinstance(lease.place, NvmeFile) else "host", lease.num_bytes)

    def check_space(self, num_bytes: int) -> None:
        """Check that so many bytes more can be put on nvme.

        Raises:
            UsageError: they cannot.
        """
        if num_bytes:
            check_folders(self._nvme_folders, num_bytes)

    def has_host_space(self, num_bytes: int) -> bool:
        """True if the host's pool has a block for so many bytes."""
        return self._host.has_space(num_bytes)

    def trim(self, host_block_bytes: int) -> None:
        """Free blocks of the host's beyond so many bytes, and files beyond what steps are prepared for.

        What is in use stays.
        """
        self._host.shrink(host_block_bytes)
        if self._files is not None:
            self._files.trim()

    def read_file(self, file: NvmeFile, into: Stored) -> None:
        """Read a file into a block of the host's, on any thread; blocks until it is there."""
        assert isinstance(into.lease.place, torch.Tensor)
        file.read(into.lease.place).result()

    def hold(self, value: torch.Tensor, tier: str) -> Stored:
        """A copy of ``value`` in a slower tier, once it is there."""
        return self.offload(value.to(self.device), tier).finish(value)

    def load(self, stored: Stored) -> torch.Tensor:
        """A copy on the device of what is stored, once it is there."""
        loaded = self.reload(stored).finish(stored)
        assert isinstance(loaded, torch.Tensor)
        return loaded

    def run_on_host(self, function: Callable[[list[Any]], object], inputs: list[Any], bucket: int) -> None:
        """Have the host run an update, with the tensors themselves in the place of what is stored; empties ``inputs``.

        Updates run one after the other on a thread of their own, so that what they allocate does not count as the
        device's on a CPU machine. Each begins once nothing else reads or writes what it is given, and what is copied
        from there later waits for it. What went wrong is raised by those copies, and by ``settle_host``.
        """
        held = list(inputs)
        inputs.clear()
        self.keep(held, in_place=True)
        stored = [value for value in held if isinstance(value, Stored)]
        awaited = [copy.join for value in stored for copy in value.lease.users]
        awaited += [after for value in stored if (after := value.update_to_await) is not None]
        tensors = [value.memory if isinstance(value, Stored) else value for value in held]
        update = self._host_worker().submit(_run_update, bucket, function, tensors, awaited)
        for value in stored:
            value.num_writes += 1
            value.updated, value.landed = update, update.result
            value.lease.used_by(FutureCopy(update))
        self._updates[bucket] = update

    def run_on(
        self, bucket: int, copies: Sequence[Pending[Any]], held: Sequence[object], *, back: bool = False
    ) -> None:
        """Let a step end before the host is done with the update of ``bucket``, and before ``copies`` of it are, which
        read what is ``held``: the next ``settle_host`` of the bucket, or ``finish_updates``, waits for them. ``back``:
        the copies are of what goes back to its tier, and are all that is waited for."""
        update = None if back else self._updates.pop(bucket, None)
        self._running_on[bucket, back] = _RunningOn(tuple(copies), tuple(held), update)

    def settle_host(self, bucket: int, held: Sequence[object] = (), *, back: bool = False) -> None:
        """Block until the last update of ``bucket`` on the host, which may read what is ``held``, is done, or what goes
        ``back`` to its tier is there.

        Raises:
            TierError: it has failed; again in every later call, where it has run on after its step.
        """
        if (earlier := self._running_on.get((bucket, back))) is not None:
            earlier.finish()
            del self._running_on[bucket, back]
        update = None if back else self._updates.pop(bucket, None)
        if update is not None:
            update.result()

    def finish_updates(self) -> None:
        """Block until all that runs on after the last step is done, and the device may read it.

        Raises:
            TierError: an update, or a copy, has failed.
        """
        for bucket, back in list(self._running_on):
            self.settle_host(bucket, back=back)

    def _host_worker(self) -> ThreadPoolExecutor:
        if self._host_thread is None:
            self._host_thread = ThreadPoolExecutor(1, thread_name_prefix="zerofx-host")
        return self._host_thread

    def _start(self, into: Place, source: Place) -> Pending[Any]:
        """Start a copy between two tiers, through a block on the host where neither end is there."""
        if isinstance(into, torch.Tensor):
            assert isinstance(source, Stored)
            return self._start_back(into, source)
        num_bytes, place = into.lease.num_bytes, into.lease.place
        if isinstance(source, torch.Tensor):
            block = self._lease("host", num_bytes) if isinstance(place, NvmeFile) else into.lease
            assert isinstance(block.place, torch.Tensor)
            copy = self._device_copies().start(TO_HOST, _bytes_of(source), block.place[:num_bytes])
            block.used_by(copy)
            self.moved_bytes[TO_HOST] += num_bytes
            if isinstance(place, torch.Tensor):
                into.landed = copy.join
                return Pending.from_waits(into, copy.finish)
            return self._start_write(into, block.place, copy.join, copy.finish, then=block.end)
        if isinstance(place, NvmeFile):
            assert isinstance(source.lease.place, torch.Tensor), "a copy is between two tiers"
            after = source.update_to_await or _return_at_once
            return self._start_write(into, source.lease.place, after, _return_at_once, then=_return_at_once)
        assert isinstance(source.lease.place, NvmeFile), "a copy is between two tiers"
        read = source.lease.place.read(place)  # which may be another step's
        self.moved_bytes[NVME_READ] += num_bytes
        return Pending.from_waits(into, read.result)

    def _start_write(
        self,
        into: Stored,
        block: torch.Tensor,
        after: Callable[[], None],
        finish: Callable[[], object],
        *,
        then: Callable[[], None],
    ) -> Pending[Any]:
        assert isinstance(into.lease.place, NvmeFile)
        written = self._nvme_files().write(into.lease.place, block, after)
        self.moved_bytes[NVME_WRITE] += into.lease.num_bytes
        return Pending.from_waits(into, finish, written.result, then)

    def _start_back(self, into: torch.Tensor, source: Stored) -> Pending[Any]:
        num_bytes, place = source.lease.num_bytes, source.lease.place
        self.moved_bytes[TO_DEVICE] += num_bytes
        if isinstance(place, torch.Tensor):
            copy = self._device_copies().start(
                TO_DEVICE, place[:num_bytes], _bytes_of(into), after=source.update_to_await
            )
            source.lease.used_by(copy)
            return Pending.from_waits(into, copy.finish)
        block = self._lease("host", num_bytes)
        assert isinstance(block.place, torch.Tensor)
        read = place.read(block.place)
        self.moved_bytes[NVME_READ] += num_bytes
        copy = self._device_copies().start(TO_DEVICE, block.place[:num_bytes], _bytes_of(into), after=read.result)
        block.used_by(copy)
        return Pending.from_waits(into, copy.finish, block.end)

    def settle(self) -> None:
        """Block until nothing is under way: after a step that failed."""
        running_on = [each.update for each in self._running_on.values() if each.update is not None]
        concurrent.futures.wait([*self._updates.values(), *running_on])
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
        if self._host_thread is not None:
            self._host_thread.shutdown()
        self._running_on.clear()
        self._host.clear()
        self._files = self._copies = self._host_thread = None

    def _device_copies(self) -> Copies:
        if self._copies is None:
            self._copies = CudaCopies(self.device, self.log) if self.device.type == "cuda" else ThreadCopies(self.log)
        return self._copies

    def _nvme_files(self) -> NvmeFiles:
        assert self._files is not None, "a step that uses nvme has been prepared for"
        return self._files

    def _lease(self, tier: str, num_bytes: int) -> Lease[torch.Tensor] | Lease[NvmeFile]:
        lease: Lease[torch.Tensor] | Lease[NvmeFile]
        if tier == "host":
            lease = Lease(self._host.take(num_bytes), num_bytes, self._give_back_block)
        else:
            lease = Lease(self._nvme_files().take(num_bytes), num_bytes, self._give_back_file)
        self._count(tier, num_bytes)
        return lease

    def _give_back_block(self, block: torch.Tensor, num_bytes: int, copies: Sequence[Copy]) -> None:
        self._host.give_back(block, copies)
        self._count("host", -num_bytes)

    def _give_back_file(self, file: NvmeFile, num_bytes: int, _copies: Sequence[Copy]) -> None:
        if self._files is not None:
            self._files.give_back(file)
        self._count("nvme", -num_bytes)

    def _count(self, tier: str, num_bytes: int) -> None:
        self._held[tier] += num_bytes
        self._peak[tier] = max(self._peak[tier], self._held[tier])


@dataclass(frozen=True)
class _RunningOn:
    """A bucket's ``update`` on the host, if it has one, and ``copies``, which go on after the step that began them."""

    copies: tuple[Pending[Any], ...]
    held: tuple[object, ...]
    update: Future[None] | None

    def finish(self) -> None:
        if self.update is not None:
            self.update.result()
        for copy in self.copies:
            copy.finish(None)


def _run_update(
    bucket: int, function: Callable[[list[Any]], object], tensors: list[Any], awaited: Sequence[Callable[[], None]]
) -> None:
    for await_one in awaited:
        await_one()
    try:
        with torch.no_grad():  # which holds for one thread
            function(tensors)
    except Exception as error:
        raise TierError(
            f"expected the update of bucket {bucket} on the host to be done, found that it failed "
            f"({type(error).__name__}: {error}): restore a checkpoint before training on"
        ) from error


def _return_at_once() -> None:
    """Return at once: the wait for a source that is on the host already."""


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """All bytes from the first to the last element of ``value``, gaps included, as a flat uint8 view."""
    numel = storage_bytes(value) // value.element_size()
    return value.as_strided((numel,), (1,)).view(torch.uint8)
