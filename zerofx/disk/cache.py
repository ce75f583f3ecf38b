"""A cache on disk, by key, of texts that took long to compute.

An entry is data, never code. It carries its own hash, so that a truncated, damaged or foreign entry counts as absent
and is written again; so does an entry whose hash is right and whose text does not parse (``read_as``). The folder is
the user's own, or root's (``own_files.py``): one that others can write to is not used. Files are replaced as a whole:
any number of processes may read and write one folder. Other files in it are left alone: only files named like entries
are deleted to make space.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch

from zerofx.disk.own_files import PART, UnsafeError, notify_once, own_folder, read_own, write_own
from zerofx.errors import notify

T = TypeVar("T")

# What reading a text raises that is not what it should be.
MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MOST_BYTES = 256 << 20  # in one folder; beyond that what was not read for longest goes
_PREFIX, _DAY_SECONDS = "zerofx-", 86_400
_HASH_BYTES = hashlib.sha256().digest_size
EntryKind = Literal["capture", "sharing", "plan", "step", "machine", "vectors", "headers", "kernel"]
_OURS = re.compile(rf"(?:{'|'.join(get_args(EntryKind))})-[0-9a-f]{{64}}|{_PREFIX}.*\{PART}")


@dataclass(frozen=True)
class DiskCache:
    """The entries under ``folder``; with None there are none, and nothing is written."""

    folder: Path | None
    most_bytes: int = _MOST_BYTES

    def read(self, key: str) -> str | None:
        """The text that was written for ``key``; None if there is none, or it is not whole."""
        if self.folder is None:
            return None
        try:
            with own_folder(self.folder) as folder:
                try:
                    data = read_own(folder, key)
                except OSError:
                    return None
                packed = data[_HASH_BYTES:]
                if _hash(key, packed) != data[:_HASH_BYTES]:
                    return None
                with contextlib.suppress(OSError):  # root's folder is read, too
                    os.utime(key, dir_fd=folder)
                return zlib.decompress(packed).decode()
        except UnsafeError as error:
            self._warn_unsafe(error)
            return None
        except (OSError, zlib.error, UnicodeDecodeError):
            return None

    def read_as(self, key: str, read: Callable[[str], T]) -> T | None:
        """The text for ``key``, parsed by ``read``; None if there is none, or zerofx has not written it."""
        text = self.read(key)
        try:
            return read(text) if text is not None else None
        except MALFORMED:
            return None

    def write(self, key: str, text: str) -> None:
        """Keep ``text`` for ``key``; if that is impossible, a warning says what to do."""
        if self.folder is None:
            return
        packed = zlib.compress(text.encode(), 1)
        try:
            with own_folder(self.folder, make=True) as folder:
                write_own(folder, key, _hash(key, packed) + packed, prefix=_PREFIX)
                self._bound(folder)
        except UnsafeError as error:
            self._warn_unsafe(error)
        except OSError as error:
            notify(
                f"cannot keep what was compiled for the next run in {self.folder} ({error}): set ZEROFX_CACHE_DIR to a "
                f"folder that can be written to, or to 0"
            )

    def _warn_unsafe(self, error: UnsafeError) -> None:
        notify_once(
            f"nothing is kept for the next run, nor read, since {error}. Set ZEROFX_CACHE_DIR to a folder that only "
            f"you can write to, or to 0"
        )

    def _bound(self, folder: int) -> None:
        entries = []
        for name in os.listdir(folder):
            if not _OURS.fullmatch(name):
                continue
            try:
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:  # another process was first
                continue
            if not stat.S_ISREG(about.st_mode):
                continue
            if name.endswith(PART) and time.time() - about.st_mtime < _DAY_SECONDS:
                continue  # which a process is about to put in its place
            entries.append((about.st_mtime_ns, about.st_size, name))
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries):
            if total <= self.most_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= size


NOT_KEPT = DiskCache(None)


def key_of(kind: EntryKind, parts: Sequence[str]) -> str:
    """The key of a result of ``parts`` in these versions of zerofx, torch and Python."""
    text = json.dumps([kind, *versions(), *parts])
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


def versions() -> tuple[str, ...]:
    """The versions of the running code: zerofx by its files, torch and Python by their version strings."""
    own = _hash_of_sources(Path(__file__).parents[1])
    return own, torch.__version__, str(torch.version.git_version), sys.version, str(torch.version.cuda)


@functools.cache
def _hash_of_sources(folder: Path) -> str:
    hashed = hashlib.sha256()
    # Packages of zerofx may be links to folders next to it.
    walked = os.walk(folder, followlinks=True)
    for path in sorted(Path(inside, name) for inside, _, names in walked for name in names if name.endswith(".py")):
        hashed.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()


def _hash(key: str, packed: bytes) -> bytes:
    """The hash of an entry, including its key: an entry under another's name is invalid."""
    return hashlib.sha256(key.encode() + b"\0" + packed).digest()
