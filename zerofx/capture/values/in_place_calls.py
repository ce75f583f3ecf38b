"""In-place calls of a forward or a loss for which tracing has no functional form, or one with other bits.

A contrastive loss gathers the features of all ranks (``torch.distributed.nn.all_gather``), a queue or a centre reduces
detached tensors (``dist.all_gather``, ``dist.all_reduce``). While a forward is traced these become functional
collectives, which are graph nodes. The step runs them at the same place, in the same order on all ranks, with the
results of the original calls. They are part of a step at every stage, like any other operator.

A product that is added in place to what does not lie in rows (``weight.T.clone().addmm_(a, b)``) is one of the
transposed matrices, as BLAS is called for it; tracing would have one in rows, which is summed in another order. Does
not handle ``baddbmm_``, whose kernels choose by more than the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zerofx.capture.blame import line_of_caller
from zerofx.errors import CaptureError
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.distributed import gather_with, make_finished_work, name_of_reduction, unbox_group
from zerofx.torch_private.operators import OpOverload, schema_of


class InPlaceCalls(TorchDispatchMode):
    """While active, replaces these calls by functional ones, whose results are then copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.addmm_.default and _goes_by_columns(args[0]):
            first, second = (x if 1 in x.stride() else x.contiguous() for x in args[1:])  # of others BLAS gets a copy
            return args[0].copy_(_aten.addmm.default(args[0].mT, second.mT, first.mT, **kwargs).mT)
        if not isinstance(func, OpOverload) or func.namespace != "c10d":
            return func(*args, **kwargs)
        match schema_of(func).name, args:
            case "c10d::allgather_", [outputs, [tensor], group, *_]:
                for output, part in zip(outputs[0], _gather(tensor, unbox_group(group)), strict=True):
                    output.copy_(part)
                return outputs, make_finished_work()
            case "c10d::_allgather_base_", [output, tensor, group, *_]:
                output.copy_(_gather(tensor, unbox_group(group)).reshape(output.shape))
                return output, make_finished_work()
            case "c10d::allreduce_", [tensors, group, operation, *_]:
                for tensor in tensors:
                    tensor.copy_(_all_reduce(tensor, name_of_reduction(operation), unbox_group(group)))
                return tensors, make_finished_work()
        raise CaptureError(
            f"expected a forward whose collectives are all_gather, all_gather_into_tensor and all_reduce of "
            f"torch.distributed, or functional ones (torch.distributed._functional_collectives), found "
            f"{schema_of(func).name} at\n  {line_of_caller() or '(line not found)'}\n"
            f"Use one of those in its place, or call it outside the step."
        )


def _goes_by_columns(x: torch.Tensor) -> bool:
    """True if BLAS is asked for a product in columns where ``x`` lies, or in a copy, and not in new memory of rows."""
    (rows, columns), (down, across) = x.shape, x.stride()
    has_columns = down == 1 and (columns == 1 or across >= rows)
    has_rows = across == 1 and (rows == 1 or down >= columns)
    return (has_columns or not has_rows) and (down, across) != (columns, 1)


class _Gather(torch.autograd.Function):
    """The values of all ranks, ``[ranks, ...]``; its gradient is the sum of all ranks' gradients in their order."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, num_ranks = gradients[0].contiguous(), ctx.group.size()
        if dist.get_backend(ctx.group) == dist.Backend.NCCL:
            shard = _collectives.reduce_scatter_tensor(gradient.flatten(0, 1), "sum", num_ranks, ctx.group.group_name)
            return _collectives.wait_tensor(shard).reshape(gradient.shape[1:]), None
        splits = [1] * num_ranks
        parts = _collectives.all_to_all_single(gradient, splits, splits, ctx.group.group_name)
        return _collectives.wait_tensor(parts).sum(0), None


class _AllGather:
    """Replaces the autograd function whose backward sends by rank, so that each rank would have a graph of its own."""

    @staticmethod
    def apply(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered: torch.Tensor = _Gather.apply(tensor, group or dist.group.WORLD)  # type: ignore[no-untyped-call]  # torch's
        return gathered.unbind(0)


@contextlib.contextmanager
def traceable_in_place_calls() -> Iterator[None]:
    """While open, collectives in what is traced become nodes of its graph, and products in place keep their bits."""
    with gather_with(_AllGather), InPlaceCalls():  # type: ignore[no-untyped-call]  # torch's
        yield


_aten = torch.ops.aten
_collectives = torch.ops._c10d_functional


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    flat = tensor.contiguous().reshape(1, -1)
    whole = _collectives.wait_tensor(_collectives.all_gather_into_tensor(flat, group.size(), group.group_name))
    result: torch.Tensor = whole.reshape(group.size(), *tensor.shape)
    return result


def _all_reduce(tensor: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    result: torch.Tensor = _collectives.wait_tensor(_collectives.all_reduce(tensor, operation, group.group_name))
    return result
