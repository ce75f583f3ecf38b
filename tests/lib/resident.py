"""Files that each test process reads when it starts, held in memory while a run lasts.

Some kernels (those that reclaim proactively, with DAMON) drop pages of files that nobody has touched for some minutes.
Every process that a test starts then reads torch from the disk anew: on two cores half of a run's time was waiting for
the disk. Locked pages stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import mmap
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SUFFIXES = (*importlib.machinery.BYTECODE_SUFFIXES, ".so")


def lock_libraries() -> int:
    """Locks what Python and its packages are loaded from, until this process ends; returns the bytes that are locked.

    Up to a quarter of the memory that is free, the largest files first, and nothing where the system allows none (see
    ``ulimit -l``): tests run as well without.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    left = _free_bytes() // 4
    num_bytes = 0
    for size, path in sorted(_libraries(), reverse=True):
        if size > left:
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            # Not mmap.mmap, which keeps a descriptor for each file.
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            if address in (None, ctypes.c_void_p(-1).value) or libc.mlock(address, size) != 0:
                return num_bytes
            num_bytes, left = num_bytes + size, left - size
    return num_bytes


def _libraries() -> Iterator[tuple[int, Path]]:
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}:
        for path in Path(folder).rglob("*"):
            if path.name.endswith(_SUFFIXES) or ".so." in path.name:
                size = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
                if size:
                    yield size, path


def _free_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
