"""Have the C library keep memory that a process frees, if it is glibc.

By default glibc gives large blocks back to the operating system when they are freed, and has every page of the next one
mapped and zeroed anew. A training step takes and frees the same blocks over and over: those page faults can take a
fifth of it on a machine whose memory is shared.
"""

from __future__ import annotations

import ctypes
import platform

# Parameters of mallopt(3), from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let blocks that are freed stay with this process for the next ones; False where that cannot be asked for.

    It holds for all of the process, from now on. What is resident stays at its peak. Blocks that are allocated
    already are given back as before.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
