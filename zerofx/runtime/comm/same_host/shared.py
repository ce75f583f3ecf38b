"""Buckets in memory that the ranks of a host share: each rank writes its own slice, and all can read the whole.

A gather between such ranks moves nothing. The step orders reads and writes (``passes/in_place.py``).

The memory is a file without a name (``memfd_create``), which the other ranks open through the first one's process: it
goes with the last rank that has it mapped, however ranks end. Where that is not permitted, as between containers, or
not available, as on other systems than Linux, ranks have memory of their own and copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

_WORD_BYTES = 8


class SharedBuckets:
    """The buckets that all ranks of ``group`` store next to each other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._buckets: WeakValueDictionary[int, _Bucket] = WeakValueDictionary()

    def share(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy of ``shard``, this rank's slice, next to the others'; ``shard`` itself if that is not possible.

        Collective: all ranks get the same of the two, and the others' slices are there too when it returns.
        """
        num_bytes = shard.nbytes * self._num_ranks
        if num_bytes < _WORD_BYTES:
            return shard
        pages = self._map(num_bytes)
        if pages is None:
            return shard
        bucket = _Bucket(pages)
        own = bucket.tensor(shard.dtype, shard.nbytes, self._rank * shard.nbytes, bucket)
        own.copy_(shard)
        self._buckets[own.data_ptr()] = bucket
        dist.barrier(self._group)
        return own

    def read(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor | None:
        """All ranks' slices next to ``shard``; None if it is not in shared memory. Holds ``full`` while it is there."""
        bucket = self._buckets.get(shard.data_ptr())
        return None if bucket is None else bucket.tensor(full.dtype, full.nbytes, 0, full)

    def _map(self, num_bytes: int) -> mmap.mmap | None:
        """Map the same memory on all ranks; None on all of them if one cannot."""
        whereabouts = torch.zeros(3, dtype=torch.int64, device="cpu")
        descriptor = -1
        with contextlib.ExitStack() as opened:
            if self._rank == 0 and hasattr(os, "memfd_create"):
                with contextlib.suppress(OSError):
                    descriptor = os.memfd_create("zerofx")
                    opened.callback(os.close, descriptor)
                    os.ftruncate(descriptor, num_bytes)
                    # By this word the others know that what they have opened is that.
                    whereabouts = torch.tensor([os.getpid(), descriptor, secrets.randbits(62)], device="cpu")
                    os.pwrite(descriptor, whereabouts[2].numpy().tobytes(), 0)
            dist.broadcast(whereabouts, group=self._group, group_src=0)
            pages = _open_mapping(whereabouts.tolist(), num_bytes, descriptor)
            # After this all have opened it, and read the word.
            return pages if _all_true(self._group, pages is not None) else None


def share_memory(group: dist.ProcessGroup, permitted: bool) -> SharedBuckets | None:
    """The shared buckets of ``group``, if each rank may read the memory of all others. Collective."""
    return SharedBuckets(group) if _all_true(group, permitted) else None


def _all_true(group: dist.ProcessGroup, here: bool) -> bool:
    own = torch.tensor([here], device="cpu")
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return all(every)


class _Bucket:
    """Memory that several ranks have mapped. Tensors in it keep it alive."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages

    def tensor(self, dtype: torch.dtype, num_bytes: int, first_byte: int, owner: object) -> torch.Tensor:
        """Some of its bytes as a flat tensor, which keeps ``owner`` alive for as long as its memory is in use."""
        buffer: ctypes.Array[ctypes.c_char] = (ctypes.c_char * num_bytes).from_buffer(self._pages, first_byte)
        buffer.owner = owner  # type: ignore[attr-defined]  # instances take attributes
        return torch.frombuffer(buffer, dtype=dtype)


def _open_mapping(whereabouts: list[int], num_bytes: int, descriptor: int) -> mmap.mmap | None:
    """Map the memory at ``whereabouts`` (process, its descriptor, the word in it); None if that is impossible."""
    pid, there, word = whereabouts
    if not pid:
        return None
    try:
        here = descriptor if descriptor >= 0 else os.open(f"/proc/{pid}/fd/{there}", os.O_RDWR)
        try:
            pages = mmap.mmap(here, num_bytes)
        finally:
            if here != descriptor:
                os.close(here)
    except (OSError, ValueError):  # not permitted, not there, or of another size
        return None
    return pages if int.from_bytes(pages[:_WORD_BYTES], "little") == word else None
