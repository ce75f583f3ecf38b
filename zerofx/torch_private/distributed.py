"""Process groups, and the operators that are given them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

default_store = _get_default_store
"""The store that the default process group was made with."""

gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers shards into one tensor, under the name that torch has for it: the other one to 2.12, where 2.13 warns."""

reduce_single: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduces one tensor to a shard on each rank, as ``gather_single``."""


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout that a process group was made with, the least of its backends'; None where it has none."""
    found = []
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        found += [options._timeout] if hasattr(options, "_timeout") else []
    return min(found, default=None)


def unboxed_group(group: Any) -> dist.ProcessGroup:
    """The process group that an operator of c10d is given."""
    return dist.ProcessGroup.unbox(group)


def boxed_work() -> Any:
    """What an operator of c10d gives to wait for, of a collective that is done."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def name_of_reduction(operation: Any) -> str:
    """``"sum"`` or the like, for the reduction that an operator of c10d is given."""
    name: str = dist.ReduceOp.RedOpType(int(operation.op())).name
    return name.lower()


@contextlib.contextmanager
def gathering_by(function: type) -> Iterator[None]:
    """While open, ``torch.distributed.nn`` gathers by ``function.apply(group, tensor)``, and while compiling too."""
    from torch.distributed.nn import functional  # not needed where nothing is traced

    names = vars(functional)
    instead: dict[str, Any] = {"_AllGather": function, "_not_supported_under_compile": lambda *_, **__: None}
    before = {name: names[name] for name in instead if name in names}
    names.update({name: instead[name] for name in before})
    try:
        yield
    finally:
        names.update(before)
