"""Values in any tier as tensors on the CPU, to be written to files and read from them, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from zerofx.runtime.tiers.nvme import NvmeFile
from zerofx.runtime.tiers.tiers import Stored, Tiers


@contextlib.contextmanager
def shown_on_host(value: torch.Tensor | Stored, first: int, last: int, tiers: Tiers) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of a flat tensor: where they lie, if that is the host, or else a copy.

    What is on nvme is read into a block of the host's, and never goes through the device.
    """
    if isinstance(value, torch.Tensor):
        yield value[first:last].cpu()
    elif isinstance(value.lease.place, NvmeFile):
        block = tiers.reload(value, "host").finish(value)
        assert isinstance(block, Stored)
        yield block.tensor[first:last]
    else:
        yield value.tensor[first:last]


def overwrite(value: torch.Tensor | Stored, fill: Callable[[torch.Tensor], None], tiers: Tiers) -> None:
    """Give a flat tensor the values that ``fill`` writes into a tensor of its shape and dtype on the CPU."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            fill(value)
            return
        copy = torch.empty(value.shape, dtype=value.dtype)
        fill(copy)
        value.copy_(copy)
        return
    value.lease.landed()
    if isinstance(value.lease.place, NvmeFile):
        block = tiers.empty_stored(value.shape.numel(), value.dtype, "host")
        fill(block.tensor)
        tiers.copy_into(value, block).finish(block)
    else:
        value.count_copy()
        fill(value.tensor)
