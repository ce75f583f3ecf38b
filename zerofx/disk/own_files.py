"""Folders and files that only the user can have written, and atomic writes.

Files that zerofx reads back by itself (caches, dumps) are in folders of the user's or root's own that others cannot
write to. A folder is opened component by component, each by the descriptor of the one before: a link on the way counts
only if the user or root has made it, and renaming meanwhile changes nothing. All further operations are relative to the
descriptor of the checked folder.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zerofx.errors import UsageError, notify

PART = ".part"  # ends the name of a file that is being written
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER  # a folder on the way may be one that cannot be listed
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as Linux follows


class UnsafeError(PermissionError):
    """A folder or file that somebody else may have written, or could write; the message says which, and why."""


def is_trusted(about: os.stat_result) -> bool:
    """True if a file or folder is the user's or root's."""
    return about.st_uid in (os.geteuid(), 0)


@contextlib.contextmanager
def own_folder(path: Path, *, make: bool = False, shared: bool = False) -> Iterator[int]:
    """The descriptor of a folder that only the user, or root, can write to.

    ``make``: missing parts of ``path`` are created, for the user alone. ``shared``: others may write to it if they
    cannot rename or remove files of others, as in the system's temporary folder.

    Raises:
        UnsafeError: the folder is another user's, others can write to it, or a link of another user's leads there.
        OSError: there is no such folder, or it cannot be opened or made.
    """
    folder = _open(path, make=make)
    try:
        about = os.fstat(folder)
        if not is_trusted(about):
            raise UnsafeError(f"{path} belongs to another user (uid {about.st_uid})")
        if about.st_mode & _OTHERS_WRITE and not (shared and about.st_mode & stat.S_ISVTX):
            mode, change = stat.S_IMODE(about.st_mode), "+t" if shared else "go-w"
            raise UnsafeError(f"others can write to {path} (mode {mode:o}; chmod {change} mends that)")
        yield folder
    finally:
        os.close(folder)


def unsafe_reason(path: Path, *, shared: bool = False) -> str:
    """The reason not to trust a folder; empty if it is trusted, or does not exist yet. ``shared`` as above."""
    try:
        with own_folder(path, shared=shared):
            return ""
    except UnsafeError as error:
        return str(error)
    except OSError:
        return ""


def _open(path: Path, *, make: bool) -> int:
    left = list(reversed(Path(os.path.abspath(path)).parts))
    folder, num_links = os.open(left.pop(), _PASS), 0
    try:
        while left:
            name = left.pop()
            try:
                if stat.S_ISLNK((about := os.stat(name, dir_fd=folder, follow_symlinks=False)).st_mode):
                    num_links += 1
                    if not is_trusted(about):
                        raise UnsafeError(f"{name} in {path} is a link of another user's (uid {about.st_uid})")
                    if num_links > _MOST_LINKS:
                        raise UnsafeError(f"{path} has more than {_MOST_LINKS} links")
                    parts = Path(os.readlink(name, dir_fd=folder)).parts
                    left += reversed(parts)
                    continue
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another process was first
                    os.mkdir(name, 0o700, dir_fd=folder)
            inner = os.open(name, _PASS, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def open_plain(folder: int, name: str) -> int:
    """A descriptor to read a plain file of an open folder: links are not followed, pipes and devices not waited for.

    Raises:
        UnsafeError: it is not a plain file.
        OSError: there is no such file, it is a link, or it cannot be read.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, and symbolic links are not followed", name) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeError(f"{name} is no plain file")
    return descriptor


def read_plain(folder: int, name: str, most_bytes: int) -> bytes:
    """The bytes of a plain file of an open folder, as ``open_plain``.

    Raises:
        OSError: as there, or it has more than ``most_bytes``.
    """
    descriptor = open_plain(folder, name)
    try:
        if (size := os.fstat(descriptor).st_size) > most_bytes:
            raise OSError(errno.EFBIG, f"{size:,} bytes, where at most {most_bytes:,} are read", name)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def read_own(folder: int, name: str) -> bytes:
    """The bytes of a file of ``own_folder``.

    Raises:
        UnsafeError: it is not a plain file, another user's, or others can write to it.
        OSError: there is no such file, it is a link, or it cannot be read.
    """
    descriptor = open_plain(folder, name)
    try:
        about = os.fstat(descriptor)
        if not is_trusted(about) or about.st_mode & _OTHERS_WRITE:
            raise UnsafeError(f"{name} is no plain file that only its user can write to")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_own(
    folder: int, name: str, data: bytes, *, prefix: str = "zerofx-", mode: int = 0o600, exact_mode: bool = False
) -> None:
    """Write a file of ``own_folder`` as a whole: under another name, synced, and then renamed.

    ``mode`` is reduced by the process's mask, unless ``exact_mode``.
    """
    part = f"{prefix}{secrets.token_hex(8)}{PART}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if exact_mode:
                os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user has named: either the old or the new one is there, whole, if this is interrupted.

    A link is followed, since that is the user's choice; anything but a plain file, such as a pipe, is written to.

    Raises:
        OSError: it cannot be written.
    """
    whole = Path(os.path.realpath(path))
    if whole.exists() and not whole.is_file():
        whole.write_text(text, encoding="utf-8")
        return
    try:
        folder = os.open(whole.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error  # the user's own word for it
    before = stat.S_IMODE(whole.stat().st_mode) if whole.exists() else None
    try:
        mode = 0o666 if before is None else before
        prefix = f".{whole.name[:50]}-"
        write_own(folder, whole.name, text.encode(), prefix=prefix, mode=mode, exact_mode=before is not None)
    finally:
        os.close(folder)


@functools.cache
def private_folder() -> Path:
    """A temporary folder that only this process knows, and that is removed with it."""
    folder = Path(tempfile.mkdtemp(prefix="zerofx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def notify_once(message: str) -> None:
    """Call ``notify`` once per message and process."""
    notify(message)


_MOST_BYTES = 2**30  # of a plan or a graph, many times what one has


def read_named(path: str | Path) -> str:
    """The content of a file, as text; a pipe is read to its end, a device is not read.

    Raises:
        OSError: it cannot be read, is a device, or is longer than any file of ours.
        UnicodeDecodeError: it is not text.
    """
    with Path(path).open("rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is a device")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"{path} has more than {_MOST_BYTES} bytes")
    return data.decode()


def write_named(path: str | Path, text: str) -> None:
    """Write a file as a whole, like ``write_text``; characters that UTF-8 cannot encode are escaped.

    Raises:
        UsageError: it cannot be written; a plain file keeps its old content.
    """
    try:
        write_text(path, escape_for_utf8(text))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"expected a file that can be written, found none at {path}: {why}") from error


def escape_for_utf8(text: str) -> str:
    """Escape the characters of ``text`` that UTF-8 cannot encode, such as half a surrogate pair in a layer's name."""
    return text.encode("utf-8", "backslashreplace").decode()
