"""Folders for generated files: one per step, in a folder of the user's from which old ones are deleted.

A process holds a lock on the folder of each step that it runs, so that no other deletes it. Nothing is read from here:
the step that runs is the one in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
import weakref
from pathlib import Path

from zerofx.disk.own_files import PART, UnsafeError, notify_once, own_folder, private_folder, write_own
from zerofx.errors import UsageError
from zerofx.settings import user_cache

SOURCE, PLAN = "step.py", "plan.json"
_LOCK = ".lock"
_NAME = re.compile(r"[0-9a-f]{12}")
_MOST_SECONDS, _MOST_BYTES = 7 * 86_400, 64 << 20


def write_source(dump_dir: Path | None, name: str, source: str) -> Path:
    """Write a step's source to the folder ``name`` (12 hex digits), and return its path.

    The folder is in ``dump_dir``, or else in the user's cache folder; if somebody else could write to that, a warning
    says so, and files are written to a private temporary folder that is removed with the process.

    Raises:
        UsageError: ``dump_dir`` is not a folder that can be written to.
    """
    base = dump_dir or (user_cache() or private_folder()) / "dumps"
    try:
        _write(base / name, {SOURCE: source}, clear=True)
    except UnsafeError as error:
        notify_once(
            f"generated steps are written to a temporary folder, since {error}. Set ZEROFX_DUMP_DIR to a folder that "
            f"only you can write to"
        )
        base = private_folder()
        _write(base / name, {SOURCE: source})
    except OSError as error:
        if dump_dir is not None:
            raise UsageError(
                f"expected a folder to write the generated step to, found that {base / name} is none ({error}): set "
                f"ZEROFX_DUMP_DIR to one"
            ) from error
        base = private_folder()
        _write(base / name, {SOURCE: source})
    return base / name / SOURCE


def write_plan(source_path: Path, text: str) -> None:
    """Put a step's plan next to its source."""
    _write(source_path.parent, {PLAN: text})


def hold(source_path: Path, holder: object) -> None:
    """Keep the folder of a step from being deleted for as long as ``holder`` lives."""
    with contextlib.suppress(OSError), own_folder(source_path.parent) as folder:
        lock = _lock(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            weakref.finalize(holder, os.close, lock)


def _write(path: Path, files: dict[str, str], *, clear: bool = False) -> None:
    with own_folder(path.parent, make=True) as base:
        if clear:
            _clear(base, path.name)
    with own_folder(path, make=True) as folder:
        for name, text in files.items():
            write_own(folder, name, text.encode())


def _clear(base: int, needed: str) -> None:
    """Remove the folders of steps with the oldest writes, beyond a number of days and of bytes.

    Kept are the one that is ``needed``, those that some process holds, and those with files that are not ours.
    """
    dumps = []
    for name in os.listdir(base):
        if name != needed and _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                dumps.append((*_age_and_size(base, name), name))
    total, now = 0, time.time()
    for seconds, num_bytes, name in sorted(dumps, reverse=True):
        total += num_bytes
        if total > _MOST_BYTES or now - seconds > _MOST_SECONDS:
            with contextlib.suppress(OSError):  # another process was first, or holds it
                _remove(base, name)


def _age_and_size(base: int, name: str) -> tuple[float, int]:
    """The time of the last write to a step's folder, and its size in bytes."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base)
    try:
        files = [os.stat(name, dir_fd=folder, follow_symlinks=False) for name in os.listdir(folder)]
        return max([os.fstat(folder).st_mtime, *(file.st_mtime for file in files)]), sum(file.st_size for file in files)
    finally:
        os.close(folder)


def _remove(base: int, name: str) -> None:
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base)
    try:
        names = os.listdir(folder)
        if not all(name in (SOURCE, PLAN, _LOCK) or name.endswith(PART) for name in names):
            return
        lock = _lock(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in {*names, _LOCK}:
                os.unlink(file, dir_fd=folder)
            os.rmdir(name, dir_fd=base)
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _lock(folder: int) -> int:
    """A descriptor of the folder's lock, which is a plain file of the user's own."""
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise UnsafeError(f"{_LOCK} is no plain file")
    return lock
