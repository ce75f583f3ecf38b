"""Texts kept on disk from one run to the next: what took long to make and follows from a key.

An entry is data, never code. It carries its own hash, so that what is truncated, damaged or of another kind counts as
absent and is written anew. Files are replaced as a whole: any number of processes may read and write one folder. Other
files in it are left alone: what goes for want of room is called like an entry.
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
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from zerofx.errors import warn

_MOST_BYTES = 256 << 20  # in one folder; beyond that what was not read for longest goes
_PREFIX, _PART, _DAY_SECONDS = "zerofx-", ".part", 86_400
_HASH_BYTES = hashlib.sha256().digest_size
Kind = Literal["capture", "plan", "step", "vectors", "headers"]
_OURS = re.compile(rf"(?:{'|'.join(get_args(Kind))})-[0-9a-f]{{64}}|{_PREFIX}.*\{_PART}")


@dataclass(frozen=True)
class DiskCache:
    """The entries under ``folder``; with None there are none, and nothing is written."""

    folder: Path | None
    most_bytes: int = _MOST_BYTES

    def read(self, key: str) -> str | None:
        """The text that was written for ``key``; None if there is none, or it is not whole."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        try:
            data = path.read_bytes()
            packed = data[_HASH_BYTES:]
            if _hash(key, packed) != data[:_HASH_BYTES]:
                return None
            with contextlib.suppress(OSError):  # another user's folder is read, too
                os.utime(path)
            return zlib.decompress(packed).decode()
        except (OSError, zlib.error, UnicodeDecodeError):
            return None

    def write(self, key: str, text: str) -> None:
        """Keep ``text`` for ``key``; where that cannot be, a warning says what to do."""
        if self.folder is None:
            return
        path, packed = self._path(self.folder, key), zlib.compress(text.encode(), 1)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_PART, dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_hash(key, packed) + packed)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            self._bound(self.folder)
        except OSError as error:
            warn(
                f"cannot keep what was compiled for the next run in {self.folder} ({error}): set ZEROFX_CACHE_DIR to a "
                f"folder that can be written to, or to 0"
            )

    def _path(self, folder: Path, key: str) -> Path:
        return folder / key

    def _bound(self, folder: Path) -> None:
        found = []
        for path in folder.iterdir():
            if not _OURS.fullmatch(path.name):
                continue
            try:
                about = path.lstat()
            except FileNotFoundError:  # another process was first
                continue
            if not stat.S_ISREG(about.st_mode):
                continue
            if path.suffix == _PART and time.time() - about.st_mtime < _DAY_SECONDS:
                continue  # which a process is about to put in its place
            found.append((about.st_mtime_ns, about.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


NOT_KEPT = DiskCache(None)


def key_of(kind: Kind, parts: Sequence[str]) -> str:
    """The key of what follows from ``parts`` in these versions of zerofx, torch and Python."""
    text = json.dumps([kind, *versions(), *parts])
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


def versions() -> tuple[str, ...]:
    """What code runs here: zerofx by its files, torch and Python by their versions."""
    own = _hash_of_sources(Path(__file__).parent)
    return own, torch.__version__, str(torch.version.git_version), sys.version, str(torch.version.cuda)


@functools.cache
def _hash_of_sources(folder: Path) -> str:
    hashed = hashlib.sha256()
    # Packages of zerofx may be links to folders beside it.
    walked = os.walk(folder, followlinks=True)
    for path in sorted(Path(inside, name) for inside, _, names in walked for name in names if name.endswith(".py")):
        hashed.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()


def _hash(key: str, packed: bytes) -> bytes:
    """Of the key too: an entry under another's name is none."""
    return hashlib.sha256(key.encode() + b"\0" + packed).digest()
