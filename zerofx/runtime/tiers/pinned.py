"""Pin blocks of the host's memory, so that copies from and to a CUDA device overlap with computation.

Torch's own pinned memory is not for blocks that are counted: its allocator rounds each up to a power of two
(``aten/src/ATen/core/CachingHostAllocator.h``), almost twice what was asked for at the worst, and keeps what is freed.
"""

from __future__ import annotations

import contextlib
import weakref

import torch

from zerofx.errors import TierError
from zerofx.units import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable, of CUDA's driver_types.h: pinned for every device


def pin(block: torch.Tensor) -> None:
    """Pin all of ``block`` (uint8, whole pages) where it is, until the tensor goes.

    Raises:
        TierError: CUDA cannot pin it.
    """
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(block.data_ptr(), block.numel(), _PORTABLE)
    if int(code):
        _forget_error()
        raise TierError(
            f"expected {format_bytes(block.numel())} of the host's memory that can be pinned, found that CUDA cannot "
            f"({cudart.cudaGetErrorString(code)}): lower host_budget, or let this process have more memory"
        )
    # Memory that is given back to the operating system while it is pinned stays with the process.
    finalizer = weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr())
    finalizer.atexit = False


def _forget_error() -> None:
    """Have a launch report the error that CUDA keeps of a call that failed: the next one of a step would otherwise."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
