"""The folders that the nvme tier keeps its files in: checked, locked, and cleared of what killed processes have left.

Each process makes a folder of its own in every folder that ``ZEROFX_NVME_DIR`` names, and beside it a file that is
locked for as long as the process lives. So jobs share a drive without touching each other's files, and what has no lock
on it any more was left by a process that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path

from zerofx.errors import UsageError, warn
from zerofx.report.units import format_bytes

_PREFIX = "zerofx-"


def check_folders(folders: Sequence[Path], num_bytes: int) -> None:
    """Check that ``folders`` can hold ``num_bytes``, divided evenly among them.

    Raises:
        UsageError: there is none, one cannot be written to, or its file system has not enough space left.
    """
    if not folders:
        raise UsageError(
            f"expected a folder for the {format_bytes(num_bytes)} that the plan puts on nvme, found none: set "
            f"ZEROFX_NVME_DIR to a folder on a local drive, or to one on each of several"
        )
    by_system: dict[int, list[Path]] = {}
    for folder in folders:
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            what = "cannot be written to" if folder.is_dir() else "is no folder"
            raise UsageError(
                f"expected ZEROFX_NVME_DIR to name folders that can be written to, found that {folder} {what}"
            )
        by_system.setdefault(folder.stat().st_dev, []).append(folder)
    for together in by_system.values():
        needed, free = -(-num_bytes * len(together) // len(folders)), shutil.disk_usage(together[0]).free
        if free < needed:
            raise UsageError(
                f"expected {format_bytes(needed)} of space in {' and '.join(map(str, together))} for what the plan "
                f"puts on nvme, found {format_bytes(free)}: free some, or set ZEROFX_NVME_DIR to other drives or to "
                f"more of them"
            )


class OwnFolder:
    """A folder of this process's own in ``parent``, there until ``remove`` or the process's end.

    What processes that were killed have left in ``parent`` is removed, with a warning that says how much.

    Raises:
        UsageError: a folder cannot be made in ``parent``.
    """

    def __init__(self, parent: Path) -> None:
        try:
            num_left = _remove_left_over(parent)
            self.path, lock = _own_folder(parent)
            self.direct_flag = _direct_flag(self.path)
        except OSError as error:
            raise UsageError(
                f"expected ZEROFX_NVME_DIR to name folders that can be written to, found that {parent} is none "
                f"({error})"
            ) from error
        self.remove = weakref.finalize(self, _remove_own, os.getpid(), self.path, lock)
        if num_left:
            warn(f"removed {format_bytes(num_left)} that processes which were killed have left in {parent}")


def _own_folder(parent: Path) -> tuple[Path, int]:
    """A fresh folder, and the descriptor of the locked file beside it."""
    while True:
        folder = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = folder.with_suffix(".lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Another process may have taken the fresh file for a left one, before it was locked.
        if _try_lock(lock) and path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
            folder.mkdir(mode=0o700)
            return folder, lock
        os.close(lock)


def _remove_left_over(parent: Path) -> int:
    """Remove the folders of processes that are gone; the bytes that they took on the drive."""
    num_bytes = 0
    for path in parent.glob(f"{_PREFIX}*.lock"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        if _try_lock(lock):
            with contextlib.suppress(FileNotFoundError):
                num_bytes += sum(512 * file.stat().st_blocks for file in path.with_suffix("").iterdir())
            _remove_folder(path.with_suffix(""), lock)
        else:
            os.close(lock)
    return num_bytes


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
