"""The pool that a step's tensors lie in, each at the offset that was planned for its place among all allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

from zerofx.codegen.arena import Take
from zerofx.errors import InternalError
from zerofx.ir.aliasing import storage_bytes

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Makes a tensor of a size and strides."""


class Arena:
    """The memory of a model's steps, of which one runs at a time; as large as the largest of their pools."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: torch.Tensor | None = None
        self._tensors: dict[tuple[int, Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes of the device."""
        return 0 if self._memory is None else self._memory.numel()

    def reserve(self, num_bytes: int) -> None:
        """Be at least so large. No step runs: what lay in it is given up."""
        if num_bytes > self.num_bytes:
            self.clear()
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def clear(self) -> None:
        """Give the memory back."""
        self._tensors.clear()
        self._memory = None
        self.tidy()  # a pool of another size does not fit where this one was

    def tidy(self) -> None:
        """Have the allocator give back what it only keeps."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def tensor(self, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor at ``offset``, in a storage of its own as if it had been allocated; the same one for the same
        arguments."""
        key = (offset, size, stride, dtype)
        if key not in self._tensors:
            assert self._memory is not None, "memory has been reserved"
            num_bytes = storage_bytes(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
            # A view would share the whole memory: some operators copy, or count from, all that a view is of.
            part = from_dlpack(self._memory[offset : offset + num_bytes])
            self._tensors[key] = part.view(dtype).as_strided(size, stride)
        return self._tensors[key]


class Allocations:
    """The allocations of one step, whose regions take them in order.

    Args:
        takes: the place of each in the pool.
        pool_bytes: the pool's.
    """

    def __init__(self, takes: Sequence[Take], pool_bytes: int) -> None:
        self._takes, self._pool_bytes = takes, pool_bytes
        self._arena = Arena(torch.device("meta"))
        self._next = self._num_begun = 0

    def begin(self, arena: Arena) -> None:
        """The step begins, in the memory of ``arena``."""
        arena.reserve(self._pool_bytes)
        if self._num_begun == 1:
            arena.tidy()  # what kernels were tuned with in the first step
        self._arena, self._next = arena, 0
        self._num_begun += 1

    def take(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor.

        Raises:
            InternalError: none, or one of another size, was planned.
        """
        number = self._next
        self._next = number + 1
        place = self._takes[number] if number < len(self._takes) else (0, -1)
        if place is None:
            return torch.empty_strided(size, stride, dtype=dtype, device=self._arena.device)
        offset, num_bytes = place
        tensor = self._arena.tensor(offset, size, stride, dtype)
        if tensor.untyped_storage().nbytes() != num_bytes:
            planned = f"{num_bytes} bytes" if num_bytes >= 0 else f"{len(self._takes)} in all"
            raise InternalError(
                f"expected allocation {number} of a step to be as planned ({planned}), found one of {list(size)} in "
                f"{dtype}: give arena=False, and please report it"
            )
        return tensor
