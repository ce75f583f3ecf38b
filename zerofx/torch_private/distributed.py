"""Process groups, the operators that take them, and DTensor's rules for sharding operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, _get_default_store  # type: ignore[attr-defined]

from zerofx.errors import UsageError
from zerofx.torch_private.operators import OpOverload, pytree
from zerofx.torch_private.versions import TORCH

default_store = _get_default_store
"""The store that the default process group was made with."""

gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers shards into one tensor, under the name that torch has for it: the other one to 2.12, where 2.13 warns."""

reduce_single: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduces one tensor to a shard on each rank, as ``gather_single``."""


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a process group, the least of its backends'; None if it has none."""
    timeouts = []
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        timeouts += [options._timeout] if hasattr(options, "_timeout") else []
    return min(timeouts, default=None)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves tensors of ``device`` between a group's ranks, as ``"nccl"``; empty if there is none."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return ""
    return name


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that torch is built with, as ``(2, 29, 3)``; empty if it has none."""
    if not dist.is_nccl_available():
        return ()
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version


def gather_many(group: dist.ProcessGroup, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    """Gather slices into a tensor each on the current stream, with one call of the group: one NCCL launch."""
    outputs, inputs = ([tensor for tensor in tensors if tensor.numel()] for tensors in (fulls, shards))
    if outputs:
        options = AllgatherOptions()
        options.asyncOp = False  # else on a stream of the group's, of the usual priority
        work = group.allgather_into_tensor_coalesced(outputs, inputs, options)
        if work is not None:  # of a backend without streams
            work.wait()


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort a group's communicators on this rank alone: kernels that wait for other ranks there end.

    Torch's watchdog of the group ends with it, and the process continues.
    """
    group._get_backend(device).abort()


def unbox_group(group: Any) -> dist.ProcessGroup:
    """The process group that an operator of c10d is called with."""
    return dist.ProcessGroup.unbox(group)


def make_finished_work() -> Any:
    """The work object that an operator of c10d returns, for a collective that is already complete."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def name_of_reduction(operation: Any) -> str:
    """The name, ``"sum"`` or the like, of a reduction that an operator of c10d is called with."""
    name: str = dist.ReduceOp.RedOpType(int(operation.op())).name
    return name.lower()


@contextlib.contextmanager
def gather_with(function: type) -> Iterator[None]:
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


Dims = Sequence[object]
"""For each output, then each tensor argument: None where every rank has it, the dimension that is sharded, or
``"sum"`` where parts add up."""


def single_dim_rules(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_outputs: int
) -> list[Dims] | None:
    """The ways to shard a call on fake tensors over one axis; None if DTensor has no rule.

    Rules that need more than the dimension (a mask that lives in Python) are omitted, and so are partial results that
    are not sums.

    Raises:
        UsageError: this version of torch has no such rules.
    """
    rules = _registry().get(op)
    if rules is None:
        return None
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    def describe(leaf: Any) -> Any:
        return TensorMeta(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf

    meta_args, meta_kwargs = pytree.tree_map(describe, (tuple(args), dict(kwargs)))
    given = rules.func(op, meta_args, meta_kwargs)
    num = num_outputs + sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
    lists = [_dims(rule) for rule in given if len(rule) == num]
    return [dims for dims in lists if dims is not None]


def _dims(rule: Sequence[Any]) -> Dims | None:
    dims: list[object] = []
    for placement in rule:
        kind = type(placement).__name__
        if placement is None or kind == "Replicate":
            dims.append(None)
        elif kind in ("Shard", "_ShardingPlaceholder"):
            dims.append(int(placement.dim))
        elif kind == "Partial" and placement.reduce_op == "sum":
            dims.append("sum")
        else:
            return None
    return dims


def _registry() -> Mapping[OpOverload[..., Any], Any]:
    # Seconds to import: only who shards computation pays.
    from torch.distributed.tensor import DTensor

    # torch 2.11 has rules of four products alone; with those of 2.12 no mesh was tried.
    if TORCH < (2, 13):
        raise UsageError(
            f"expected torch 2.13 or later for a mesh with a model axis, which takes its rules of operators from "
            f"DTensor, found {torch.__version__}: leave the model axis out"
        )
    registry: Mapping[OpOverload[..., Any], Any] = (
        DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    )
    return registry
