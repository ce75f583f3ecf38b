"""Flat tensors as they are at one moment, for another thread to read while steps go on and write over them.

Nothing is copied as long as nothing is overwritten: what is read before its next update is read where it lies. What is
to be overwritten first is kept, by the thread that runs the step, right before it is:

    a tensor on the device            is copied out to a block on the host
    a block on the host, or a file    stays as it is, and what is written goes to another one, which takes its place

So each value is held twice at the most from its update until it has been read. ``spare_bytes`` bounds what is held on
the host for that; where it does not suffice, the step waits for the reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zerofx.errors import TierError
from zerofx.runtime.comm.heartbeat import Heartbeat
from zerofx.runtime.tiers.nvme import NvmeFile
from zerofx.runtime.tiers.stored import Lease, Place, Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.transfers import size_class
from zerofx.torch_private.tensors import version_of
from zerofx.units import format_bytes


@dataclass
class _Value:
    """A flat tensor of a snapshot.

    ``place`` is what training goes on with, of which elements ``first`` to ``last`` are kept. ``lease`` is where a
    stored one lies, ``copy`` where one of the device's has been copied out to. ``lock`` is held while it is read where
    it lies on the device.
    """

    place: Place
    first: int
    last: int
    version: int
    lease: Lease[torch.Tensor] | Lease[NvmeFile] | None = None
    copy: Stored | None = None
    num_host_bytes: int = 0
    is_read: bool = False
    is_torn: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(place: Place, first: int, last: int) -> _Value:
        if isinstance(place, torch.Tensor):
            return _Value(place, first, last, version_of(place))
        return _Value(place, first, last, place.version, place.lease)

    @property
    def block_bytes(self) -> int:
        """Host bytes to hold it twice."""
        if isinstance(self.place, torch.Tensor):
            return size_class((self.last - self.first) * self.place.element_size())
        assert self.lease is not None
        return 0 if isinstance(self.lease.place, NvmeFile) else size_class(self.lease.num_bytes)

    @property
    def was_changed(self) -> bool:
        """True if it has been written over where it lies, without having been kept.

        What is kept has another place before it is written over: so this looks at the place last.
        """
        if isinstance(self.place, torch.Tensor):
            return version_of(self.place) != self.version and self.copy is None
        return self.place.version != self.version and self.place.lease is self.lease


class Snapshot:
    """Keeps ``values``, each a flat tensor with the first of its elements that is kept and the one after the last.

    ``elements`` and ``done`` are for the thread that reads, value by value, and all else for the one that runs steps.

    Args:
        spare_bytes: what may be held on the host for it; None for no limit.
        num_local_ranks: ranks that share a drive.
        reads_device: whether any thread may read what is on the device. Otherwise the one that runs steps copies out
            what the reader waits for: before its update, or in ``keep_all``.
        heartbeat: of the reader; the step waits for one that hangs no more, and what it has not read is lost to it.

    Raises:
        TierError: ``spare_bytes`` do not suffice for one value.
        UsageError: there is no space on the drives for what is there twice.
    """

    def __init__(
        self,
        values: Sequence[tuple[Place, int, int]],
        tiers: Tiers,
        spare_bytes: int | None,
        *,
        num_local_ranks: int = 1,
        reads_device: bool | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._tiers, self._spare, self._host_block_bytes = tiers, spare_bytes, tiers.host_block_bytes
        self._reads_device = tiers.device.type == "cpu" if reads_device is None else reads_device
        self._changed = threading.Condition()
        self._is_over = False
        self._heartbeat = heartbeat or Heartbeat()
        self._values = {id(place): _Value.of(place, first, last) for place, first, last in values if last > first}
        self._on_device = {v.place.data_ptr(): v for v in self._values.values() if isinstance(v.place, torch.Tensor)}
        self._wanted: _Value | None = None  # what the reader waits for
        self._in_block: _Value | None = None
        files = [v.lease.num_bytes for v in self._values.values() if v.lease and isinstance(v.lease.place, NvmeFile)]
        tiers.check_space(sum(files) * num_local_ranks)
        # One more value than there is space for, lest reader and step wait for one another.
        reserve = max((v.block_bytes for v in self._on_device.values() if not self._reads_device), default=0)
        self._take_spare(size_class(max(files)) if files else 0, reserve)
        self._block = tiers.empty_stored(max(files), torch.uint8, "host") if files else None
        tiers.snapshot = self

    def _take_spare(self, *num_bytes: int) -> None:
        if self._spare is None:
            return
        if sum(num_bytes) > self._spare:
            raise TierError(
                f"expected {format_bytes(sum(num_bytes))} of host_budget to save from while steps run, found that the "
                f"plan leaves {format_bytes(max(0, self._spare))} of it: raise host_budget, or save without "
                f"asynchronous=True"
            )
        self._spare -= sum(num_bytes)

    # ------------------------------------------------------------------------------------------------ the reader's

    @contextlib.contextmanager
    def elements(self, place: Place, first: int, last: int) -> Iterator[torch.Tensor]:
        """Elements ``first`` to ``last`` of a value on the CPU, as they were; to be used in the block alone.

        Raises:
            TierError: something else than a step has changed it.
        """
        if first == last:  # nothing that a step could change, or wait for
            yield torch.empty(0, dtype=place.dtype, device="cpu")
            return
        value = self._values[id(place)]
        with contextlib.ExitStack() as held:
            if isinstance(place, torch.Tensor):
                self._await_copy(value)
                held.enter_context(value.lock)
                if value.copy is not None:
                    held.close()
                    yield value.copy.tensor[first - value.first : last - value.first]
                else:
                    yield place[first:last]
            else:
                yield self._block_of(value)[first:last]
            value.is_torn |= value.was_changed
        if value.is_torn:
            raise TierError(
                "expected parameters and states to be changed by steps alone while they are saved, found that "
                "something else has changed some: call step.finish_saving() before that, or save without "
                "asynchronous=True"
            )

    def mark_read(self, place: Place) -> None:
        """A value has been read."""
        with self._changed:
            if (value := self._values.get(id(place))) is not None:
                value.is_read = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is read: the step waits for the reader no more, nor the reader for the step."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _await_copy(self, value: _Value) -> None:
        """Wait for what only the thread that runs steps can read."""
        with self._changed:
            if value.copy is None and not self._reads_device:
                self._wanted = value
                self._changed.notify_all()
                self._changed.wait_for(lambda: value.copy is not None or self._is_over)
                self._wanted = None
            if self._is_over:
                raise TierError("expected to read what is saved while it is kept, found that the step has ended")

    def _block_of(self, value: _Value) -> torch.Tensor:
        """The memory of a stored value, as a tensor of its dtype; a file is read first."""
        assert isinstance(value.place, Stored) and value.lease is not None
        source, block = value.lease.place, value.lease.place
        if isinstance(source, NvmeFile):
            assert self._block is not None
            block = self._block.lease.place
            if self._in_block is not value:
                self._in_block = None
                self._tiers.read_file(source, self._block)
                self._in_block = value
        else:
            value.lease.join()
        assert isinstance(block, torch.Tensor)
        return block[: value.lease.num_bytes].view(value.place.dtype)

    # ------------------------------------------------------------------------------------------------ the step's

    def keep(self, places: Sequence[object], *, in_place: bool) -> None:
        """Keep those of ``places`` that are about to be written over; what is stored gets another block or file.

        ``in_place``: what reads it there and writes over it is to find its values.
        """
        for place in places:
            if isinstance(place, Stored):
                self._keep_stored(place, in_place)
            elif isinstance(place, torch.Tensor) and (value := self._on_device.get(place.data_ptr())) is not None:
                self._keep_on_device(value)

    def _keep_stored(self, place: Stored, in_place: bool) -> None:
        value = self._values.get(id(place))
        if value is None or place.lease is not value.lease or not self._wait_for_space(value):
            return
        old = place.lease
        value.is_torn |= value.was_changed
        value.num_host_bytes = value.block_bytes
        place.lease = self._tiers.another(old)
        if in_place and isinstance(old.place, torch.Tensor):
            old.join()
            assert isinstance(place.lease.place, torch.Tensor)
            place.lease.place[: old.num_bytes].copy_(old.place[: old.num_bytes])

    def keep_all(self) -> None:
        """Copy out all that only this thread can, waiting for the reader where there is no space."""
        if not self._reads_device:
            for value in self._on_device.values():
                self._keep_on_device(value)

    def end(self) -> None:
        """Give back all that is held, once nothing reads it any more."""
        if self._tiers.snapshot is not self:
            return
        self.stop()
        self._tiers.snapshot = None
        self._values, self._on_device, self._block, self._in_block = {}, {}, None, None
        self._tiers.trim(self._host_block_bytes)

    def _keep_on_device(self, value: _Value) -> None:
        if value.copy is None and self._wait_for_space(value):
            self._copy_out(value)

    def _copy_out(self, value: _Value) -> None:
        assert isinstance(value.place, torch.Tensor)
        own = value.place[value.first : value.last]
        with value.lock:
            value.is_torn |= value.was_changed
            value.num_host_bytes = value.block_bytes
            value.copy = self._tiers.offload(own, "host").finish(own)
        with self._changed:
            self._changed.notify_all()

    def _wait_for_space(self, value: _Value) -> bool:
        """Wait until a value may be held twice, or has been read; whether it has not been."""
        while True:
            with self._changed:
                self._let_go()
                if value.is_read or self._is_over:
                    return False
                held = sum(other.num_host_bytes for other in self._values.values())
                if value.copy is None and (self._spare is None or held + value.block_bytes <= self._spare):
                    return True
                wanted = self._wanted
                if wanted is None:
                    self._changed.wait(min(1.0, self._heartbeat.seconds_left))
                    self._is_over |= not self._heartbeat.seconds_left
            if wanted is not None and wanted.copy is None:
                self._copy_out(wanted)
                if wanted is value:
                    return False

    def _let_go(self) -> None:
        """Give back what was held for values that have been read."""
        for value in self._values.values():
            if value.is_read:
                value.copy, value.num_host_bytes = None, 0
                if isinstance(value.place, Stored) and value.place.lease is not value.lease:
                    value.lease = None
