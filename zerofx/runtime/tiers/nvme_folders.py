"""The folders that the nvme tier keeps its files in: checked, locked, and cleared of what killed processes have left.

Each process makes a folder of its own in every folder that ``ZEROFX_NVME_DIR`` names, and next to it a file that is
locked for as long as the process lives. So jobs share a drive without touching each other's files, and what has no lock
on it any more was left by a process that is gone. What other users have left is not touched, and files are reached
through the open folder, whatever becomes of its name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

from zerofx.disk.own_files import own_folder, unsafe_reason
from zerofx.errors import UsageError, notify
from zerofx.units import format_bytes

_PREFIX, _LOCK, _PROBE = "zerofx-", ".lock", "probe"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_folders(folders: Sequence[Path], num_bytes: int) -> None:
    """Check that ``folders`` can hold ``num_bytes``, divided evenly among them.

    Raises:
        UsageError: there is none, one cannot be written to, others could rename what is in it, or its file system has
            not enough space left.
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
        unsafe = unsafe_reason(folder, shared=True)
        if unsafe:
            raise UsageError(f"expected ZEROFX_NVME_DIR to name folders that are safe to use, found that {unsafe}")
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
            with own_folder(parent, shared=True) as shared:
                num_left = _remove_left_over(shared)
                name, lock, self._folder = _own_folder(shared)
            self.path = parent / name
            self.direct_flag = _direct_flag(self._folder)
        except OSError as error:
            raise UsageError(
                f"expected ZEROFX_NVME_DIR to name folders that can be written to, found that {parent} is none "
                f"({error})"
            ) from error
        self.remove = weakref.finalize(self, _remove_own, os.getpid(), self.path, self._folder, lock)
        # In a process that was forked off, Python 3.13 has forgotten that what is left is finalized at the end.
        atexit.register(self.remove)
        if num_left:
            notify(f"removed {format_bytes(num_left)} that processes which were killed have left in {parent}")

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file of the folder, past the page cache where the file system allows it."""
        return os.open(name, flags | self.direct_flag | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)


def _own_folder(parent: int) -> tuple[str, int, int]:
    """The name of a fresh folder, and descriptors of the locked file next to it and of the folder."""
    while True:
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(name + _LOCK, flags, 0o600, dir_fd=parent)
        # Another process may have taken the fresh file for a left one, before it was locked.
        if _try_lock(lock) and os.fstat(lock).st_nlink:
            os.mkdir(name, mode=0o700, dir_fd=parent)
            return name, lock, os.open(name, _FOLDER, dir_fd=parent)
        os.close(lock)


def _remove_left_over(parent: int) -> int:
    """Remove the folders of this user's processes that are gone; the bytes that they took on the drive."""
    num_bytes = 0
    for name in os.listdir(parent):
        if not name.startswith(_PREFIX) or not name.endswith(_LOCK):
            continue
        try:
            lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError:
            continue  # removed meanwhile, or another user's
        about = os.fstat(lock)
        if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and _try_lock(lock):
            folder = name.removesuffix(_LOCK)
            with contextlib.suppress(OSError):
                num_bytes += _bytes_in(parent, folder)
            _remove_folder(parent, folder)
        os.close(lock)
    return num_bytes


def _bytes_in(parent: int, name: str) -> int:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        names = os.listdir(folder)
        return sum(512 * os.stat(file, dir_fd=folder, follow_symlinks=False).st_blocks for file in names)
    finally:
        os.close(folder)


def _remove_own(process: int, path: Path, folder: int, lock: int) -> None:
    """Remove the folder, unless this is a copy of the process that made it."""
    if os.getpid() != process:
        return
    with contextlib.suppress(OSError), own_folder(path.parent, shared=True) as parent:
        at_path = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        if os.path.samestat(at_path, os.fstat(folder)):  # and nobody else's that has been put in its place
            _remove_folder(parent, path.name)
    os.close(folder)
    os.close(lock)


def _remove_folder(parent: int, name: str) -> None:
    shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name + _LOCK, dir_fd=parent)


def _try_lock(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _direct_flag(folder: int) -> int:
    """``O_DIRECT`` where the file system has it; some, such as those in memory, have not."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600, dir_fd=folder))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_PROBE, dir_fd=folder)
    return flag
