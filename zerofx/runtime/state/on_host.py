"""Values in any tier as tensors on the CPU, to be written to files and read from them, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.tiers.nvme import NvmeFile
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers


def is_on_nvme(value: torch.Tensor | Stored) -> bool:
    """True if a flat tensor is in a file, and has to be read to be seen."""
    return isinstance(value, Stored) and isinstance(value.lease.place, NvmeFile)


class _OneUnderWay:
    """Has one copy between nvme and the host under way at a time."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._under_way: tuple[Stored, Pending[Stored]] | None = None

    def finish(self) -> Stored | None:
        """Wait for the copy that is under way, and give what it has made; None if there is none."""
        if self._under_way is None:
            return None
        source, pending = self._under_way
        self._under_way = None
        return pending.finish(source)


class ReadAhead(_OneUnderWay):
    """Reads values on nvme into blocks of the host's, each while the one before is used: ``values`` in their order.

    Where the host's pool has no space for a second block, a value is read when it is asked for.
    """

    def __init__(self, values: Sequence[torch.Tensor | Stored], tiers: Tiers) -> None:
        super().__init__(tiers)
        self._coming = [value for value in reversed(values) if isinstance(value, Stored) and is_on_nvme(value)]

    def take(self, value: Stored) -> Stored:
        """The block with a value, the next in order, once it has been read."""
        if self._under_way is None:
            self._start()
        assert self._under_way is not None and self._under_way[0] is value, "values are asked for in their order"
        block = self.finish()
        assert block is not None
        if self._coming and self._tiers.has_host_space(self._coming[-1].lease.num_bytes):
            self._start()
        return block

    def _start(self) -> None:
        value = self._coming.pop()
        self._under_way = value, self._tiers.reload(value, "host")


@contextlib.contextmanager
def read_on_host(
    value: torch.Tensor | Stored, first: int, last: int, tiers: Tiers, ahead: ReadAhead | None = None
) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of a flat tensor: where they lie, if that is the host, or else a copy.

    What is on nvme is read into a block of the host's, and never goes through the device.
    """
    if isinstance(value, torch.Tensor):
        yield value[first:last].cpu()
    elif is_on_nvme(value):
        block = (ahead or ReadAhead([value], tiers)).take(value)
        yield block.tensor[first:last]
    else:
        yield value.tensor[first:last]


class Overwrites(_OneUnderWay):
    """Gives flat tensors other values, one by one; what is on nvme is written while the next is being filled."""

    def run(self, value: torch.Tensor | Stored, fill: Callable[[torch.Tensor], None]) -> None:
        """Give a flat tensor the values that ``fill`` writes into a tensor of its shape and dtype on the CPU."""
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                fill(value)
                return
            copy = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            fill(copy)
            value.copy_(copy)
            return
        value.lease.join()
        if not is_on_nvme(value):
            value.num_writes += 1
            fill(value.tensor)
            return
        if not self._tiers.has_host_space(value.lease.num_bytes):
            self.finish()
        block = self._tiers.empty_stored(value.shape.numel(), value.dtype, "host")
        fill(block.tensor)
        self.finish()
        self._under_way = block, self._tiers.copy_into(value, block)
