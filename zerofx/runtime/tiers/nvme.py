"""Memory of the nvme tier: files read and written past the page cache, striped over drives, and checked when read.

A tensor is cut into blocks that go round the drives in turn. Each drive has threads for reading and others for writing,
so that many blocks are under way at once, and reads ahead of their use do not queue after writes. The
hash of every block (XXH3, 64 bits, which runs at the speed of memory) is taken on other threads while it is written,
kept in this process, and compared when the block is read: what a drive, or another program, has changed or cut short is
never trained on.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from zerofx.errors import TierError
from zerofx.ir.streams import NVME_READ, NVME_WRITE
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.copies import Workers
from zerofx.runtime.tiers.nvme_folders import OwnFolder
from zerofx.scheduler.cost.transfers import PAGE, whole_pages
from zerofx.units import format_bytes

BLOCK_BYTES = 1 << 22  # what one thread moves at a time, and what has one hash
NUM_THREADS = 4  # for each drive and direction: a drive needs several transfers under way to be busy
_NUM_HASHERS = 2

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Stripe(NamedTuple):
    """One drive's share of a file."""

    drive: int
    path: Path


class NvmeFile:
    """The place of a tensor's bytes: block ``k`` is in ``parts[k % len(parts)]``, after the blocks before it there.

    ``owner`` has the folders that it is in, and reads it, for other steps too.
    """

    def __init__(self, parts: tuple[Stripe, ...], num_bytes: int, owner: NvmeFiles | None = None) -> None:
        self.parts, self._owner = parts, owner
        self.num_bytes = num_bytes
        self.hashes: list[int | None] = [None] * self.num_blocks  # None: not written since the file was taken

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        """Its size on the drives: whole pages."""
        return whole_pages(self.num_bytes)

    def read(self, buffer: torch.Tensor) -> BlocksUnderWay:
        """Read it, like ``NvmeFiles.read``."""
        assert self._owner is not None, "it is in folders"
        return self._owner.read(self, buffer)

    def place(self, block: int) -> tuple[Stripe, int]:
        """The part that a block is in, and its offset there in bytes."""
        return self.parts[block % len(self.parts)], block // len(self.parts) * BLOCK_BYTES

    def span(self, block: int) -> tuple[int, int]:
        """The first byte of a block in the tensor, and how many there are."""
        start = block * BLOCK_BYTES
        return start, min(BLOCK_BYTES, self.num_bytes - start)


class BlocksUnderWay:
    """Blocks under way."""

    def __init__(self, blocks: Sequence[Future[None]]) -> None:
        self._blocks = blocks

    def result(self) -> None:
        """Block until nothing of it is under way.

        Raises:
            TierError: one of the blocks could not be written, or is not what was written when it is read.
        """
        concurrent.futures.wait(self._blocks)
        for block in self._blocks:
            block.result()


class NvmeFiles:
    """Files of bytes, a tensor each, striped over a folder of this process's own in each of ``parents``.

    Files that are given back are written over by later ones of their size, and removed where ``reserve`` asks for it.
    ``file_bytes`` are those of all files, those that wait for reuse among them. ``log`` notes when blocks are written
    and read.

    Raises:
        UsageError: a folder cannot be made in one of ``parents``.
    """

    def __init__(self, parents: Sequence[Path], log: SpanLog | None = None) -> None:
        self._log = log or SpanLog()
        self._folders: list[OwnFolder] = []
        try:
            for parent in parents:
                self._folders.append(OwnFolder(parent))
        except BaseException:
            self._remove()
            raise
        self._readers = [Workers(f"nvme-read-{number}", NUM_THREADS) for number in range(len(parents))]
        self._writers = [Workers(f"nvme-write-{number}", NUM_THREADS) for number in range(len(parents))]
        self._hashers = Workers("nvme-hash", _NUM_HASHERS)
        self._free: dict[int, list[NvmeFile]] = {}
        self._num_files = self.file_bytes = self._reserved_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Keep files for ``num_bytes`` at most, those that are in use aside."""
        self._reserved_bytes = num_bytes

    def take(self, num_bytes: int) -> NvmeFile:
        """A file for ``num_bytes``."""
        size = whole_pages(num_bytes)
        free = self._free.get(size)
        if free:
            return NvmeFile(free.pop().parts, num_bytes, self)
        self._make_room(size)
        self._num_files += 1
        self.file_bytes += size
        # Files begin on one drive after the other, so that short ones spread as well.
        num_drives = len(self._folders)
        drives = [(self._num_files + number) % num_drives for number in range(num_drives)]
        name = f"{self._num_files}.bin"
        return NvmeFile(tuple(Stripe(drive, self._folders[drive].path / name) for drive in drives), num_bytes, self)

    def give_back(self, file: NvmeFile) -> None:
        """Take back a file that nothing reads or writes any more."""
        self._free.setdefault(file.file_bytes, []).append(file)

    def trim(self) -> None:
        """Remove files that wait for reuse, until no more are there than are reserved."""
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.file_bytes + num_bytes > self._reserved_bytes:
                for part in self._free[size].pop().parts:
                    part.path.unlink(missing_ok=True)
                self.file_bytes -= size

    def write(self, file: NvmeFile, buffer: torch.Tensor, after: Callable[[], None]) -> BlocksUnderWay:
        """Write the file from a page-aligned host block, once ``after`` has returned."""
        hashes: list[int | None] = [None] * file.num_blocks
        file.hashes = hashes  # a write that fails puts others in their place, at any time
        written = self._start(self._writers, file, partial(self._write_block, file, buffer, after))
        hash_block = partial(_hash_block, file, hashes, buffer, after)
        return BlocksUnderWay(
            [*written, *(self._hashers.submit(partial(hash_block, n)) for n in range(file.num_blocks))]
        )

    def read(self, file: NvmeFile, buffer: torch.Tensor) -> BlocksUnderWay:
        """Read the file into a page-aligned host block, and compare every block with what was written."""
        return BlocksUnderWay(self._start(self._readers, file, partial(self._read_block, file, buffer)))

    def _start(self, workers: Sequence[Workers], file: NvmeFile, job: Callable[[int], None]) -> list[Future[None]]:
        blocks = range(file.num_blocks)
        return [workers[file.place(block)[0].drive].submit(partial(job, block)) for block in blocks]

    def settle(self) -> None:
        """Block until nothing is under way."""
        for workers in (*self._readers, *self._writers, self._hashers):
            workers.settle()

    def close(self) -> None:
        """Remove all files, and the folders."""
        for workers in (*self._readers, *self._writers, self._hashers):
            workers.close()
        self._remove()

    def _remove(self) -> None:
        for folder in self._folders:
            folder.remove()

    def _write_block(self, file: NvmeFile, buffer: torch.Tensor, after: Callable[[], None], block: int) -> None:
        after()
        part, offset = file.place(block)
        start, length = file.span(block)
        view, path = _bytes(buffer, start, whole_pages(length)), part.path
        try:
            with self._log.span(NVME_WRITE, length):
                self._move(part, os.O_WRONLY | os.O_CREAT, os.pwritev, view, offset)
        except OSError as error:
            file.hashes = [None] * file.num_blocks
            raise TierError(_write_failure(path, offset, length, error)) from error

    def _read_block(self, file: NvmeFile, buffer: torch.Tensor, block: int) -> None:
        part, offset = file.place(block)
        start, length = file.span(block)
        view, path = _bytes(buffer, start, whole_pages(length)), part.path
        expected = file.hashes[block]
        if expected is None:
            raise TierError(
                f"expected bytes {offset} to {offset + length} of {path} to have been written, found that they were "
                f"not, or not wholly: look for the error of the step that wrote them"
            )
        try:
            with self._log.span(NVME_READ, length):
                moved = self._move(part, os.O_RDONLY, os.preadv, view, offset)
        except OSError as error:
            raise TierError(
                f"expected to read bytes {offset} to {offset + length} of {path}, found that they could not be "
                f"({error}): look at the drive of ZEROFX_NVME_DIR"
            ) from error
        if moved < length:
            raise TierError(
                f"expected {length} bytes at {offset} of {path}, found that the file ends at {offset + moved} bytes: "
                f"something has cut it short; let no other program write to ZEROFX_NVME_DIR, and look at the drive"
            )
        digest = xxhash.xxh3_64_intdigest(view[:length])
        if digest != expected:
            raise TierError(
                f"expected the hash {expected:016x} of bytes {offset} to {offset + length} of {path}, found "
                f"{digest:016x}: they are not what was written; let no other program write to ZEROFX_NVME_DIR, and "
                f"look at the drive"
            )

    def _move(self, part: Stripe, flags: int, call: Callable[..., int], view: memoryview, offset: int) -> int:
        """Bytes moved between ``view`` and the file at ``offset``; fewer than asked for where the file ends."""
        file = self._folders[part.drive].open(part.path.name, flags)
        try:
            done = 0
            while done < len(view):
                moved = call(file, [view[done:]], offset + done)
                done += moved
                if moved % PAGE or not moved:
                    break
            return done
        finally:
            os.close(file)


def _bytes(buffer: torch.Tensor, start: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(buffer.data_ptr() + start)).cast("B")


def _hash_block(
    file: NvmeFile, hashes: list[int | None], buffer: torch.Tensor, after: Callable[[], None], block: int
) -> None:
    """Note the hash of a block that is being written; ``hashes`` are no longer the file's where that fails."""
    after()
    hashes[block] = xxhash.xxh3_64_intdigest(_bytes(buffer, *file.span(block)))


def _write_failure(path: Path, offset: int, length: int, error: OSError) -> str:
    text = f"expected to write bytes {offset} to {offset + length} of {path}, found that they could not be ({error})"
    if error.errno not in _NO_ROOM:
        return f"{text}: look at the drive of ZEROFX_NVME_DIR"
    free = format_bytes(shutil.disk_usage(path.parent).free)
    return f"{text}, with {free} free: free some, or set ZEROFX_NVME_DIR to other drives or to more of them"
