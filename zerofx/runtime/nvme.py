"""Memory of the nvme tier: files in a folder of this process's own, read and written past the page cache.

The folder lies in the one that ``ZEROFX_NVME_DIR`` names. It is removed when the step is closed or the process ends;
what a process that was killed has left is removed by the next one that comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from zerofx.errors import TierError, UsageError
from zerofx.report.units import format_bytes
from zerofx.runtime.copies import Workers
from zerofx.runtime.host_memory import PAGE, size_class

_PREFIX = "zerofx-"
_NUM_THREADS = 4  # transfers under way at once: a drive needs several to be busy
_CHUNK_BYTES = 1 << 24  # of one system call


def check_folder(folder: Path | None, num_bytes: int) -> Path:
    """The folder for files, if it can hold ``num_bytes``.

    Raises:
        UsageError: there is none, it cannot be written to, or it has not enough space left.
    """
    if folder is None:
        raise UsageError(
            f"expected a folder for the {format_bytes(num_bytes)} that the plan puts on nvme, found none: set "
            f"ZEROFX_NVME_DIR to a folder on a local drive"
        )
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "cannot be written to" if folder.is_dir() else "is no folder"
        raise UsageError(f"expected ZEROFX_NVME_DIR to be a folder that can be written to, found that {folder} {what}")
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UsageError(
            f"expected {format_bytes(num_bytes)} of space in {folder} for what the plan puts on nvme, found "
            f"{format_bytes(free)}: free some, or set ZEROFX_NVME_DIR to another drive"
        )
    return folder


class NvmeFiles:
    """Files of bytes, a tensor each; files that are given back are written over by later ones of their size class.

    Raises:
        UsageError: a folder cannot be made in ``parent``.
    """

    def __init__(self, parent: Path) -> None:
        try:
            _remove_left_over(parent)
            self._folder, lock = _own_folder(parent)
            self._direct = _direct_flag(self._folder)
        except OSError as error:
            raise UsageError(
                f"expected ZEROFX_NVME_DIR to be a folder that can be written to, found that {parent} is none ({error})"
            ) from error
        self._workers = Workers("nvme", _NUM_THREADS)
        self._free: dict[int, list[Path]] = {}
        self._num_files = 0
        self._remove = weakref.finalize(self, _remove_own, os.getpid(), self._folder, lock)

    def take(self, num_bytes: int) -> Path:
        """A file for ``num_bytes``."""
        free = self._free.get(size_class(num_bytes))
        if free:
            return free.pop()
        self._num_files += 1
        return self._folder / f"{self._num_files}.bin"

    def give_back(self, path: Path, num_bytes: int) -> None:
        """Take back a file that nothing reads or writes any more."""
        self._free.setdefault(size_class(num_bytes), []).append(path)

    def write(self, path: Path, buffer: torch.Tensor, num_bytes: int, after: Callable[[], None]) -> Future[None]:
        """Write the first ``num_bytes`` of a page-aligned block, once ``after`` has returned."""

        def job() -> None:
            after()
            self._move(path, buffer, num_bytes, os.O_WRONLY | os.O_CREAT, os.pwritev, "written")

        return self._workers.submit(job)

    def read(self, path: Path, buffer: torch.Tensor, num_bytes: int) -> Future[None]:
        """Read ``num_bytes`` into a page-aligned block."""
        return self._workers.submit(partial(self._move, path, buffer, num_bytes, os.O_RDONLY, os.preadv, "read"))

    def settle(self) -> None:
        """Block until nothing is under way."""
        self._workers.settle()

    def close(self) -> None:
        """Remove all files, and the folder."""
        self._workers.close()
        self._remove()

    def _move(
        self, path: Path, buffer: torch.Tensor, num_bytes: int, flags: int, call: Callable[..., int], what: str
    ) -> None:
        whole = -(-num_bytes // PAGE) * PAGE
        view = memoryview((ctypes.c_char * whole).from_address(buffer.data_ptr()))
        try:
            file = os.open(path, flags | self._direct, 0o600)
            try:
                done = 0
                while done < whole:
                    moved = call(file, [view[done : done + _CHUNK_BYTES]], done)
                    if moved == 0:
                        raise OSError(errno.EIO, f"the file ends at {done} bytes")
                    done += moved
            finally:
                os.close(file)
        except OSError as error:
            raise TierError(
                f"expected {format_bytes(num_bytes)} of the nvme tier to be {what}, found that {path} could not be "
                f"({error}): look at the drive behind ZEROFX_NVME_DIR, and restart from a checkpoint"
            ) from error


def _own_folder(parent: Path) -> tuple[Path, int]:
    """A fresh folder, and the descriptor of the file beside it that is locked for as long as this process lives."""
    while True:
        folder = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = folder.with_suffix(".lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Another process may have taken the fresh file for a left one, before it was locked.
        if _try_lock(lock) and path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
            folder.mkdir(mode=0o700)
            return folder, lock
        os.close(lock)


def _remove_left_over(parent: Path) -> None:
    """Remove the folders of processes that are gone."""
    for path in parent.glob(f"{_PREFIX}*.lock"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        if _try_lock(lock):
            _remove_folder(path.with_suffix(""), lock)
        else:
            os.close(lock)


def _remove_own(process: int, folder: Path, lock: int) -> None:
    """Remove the folder, unless this is a copy of the process that made it."""
    if os.getpid() == process:
        _remove_folder(folder, lock)


def _remove_folder(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)
    os.close(lock)


def _try_lock(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _direct_flag(folder: Path) -> int:
    """``O_DIRECT`` where the file system has it; some, such as those in memory, have not."""
    probe = folder / "probe"
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return flag
