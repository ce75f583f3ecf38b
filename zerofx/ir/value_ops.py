"""Collectives on values of the step, among the ranks that share one computation.

==========================  ========================================================================================
``gather_values``           start gathering every rank's tensor: a first dimension of ranks
``reduce_scatter_values``   start summing, of a tensor with a first dimension of ranks, this rank's part
``all_reduce_values``       start reducing a tensor over the ranks: ``"sum"``, ``"max"`` or ``"min"``
``exchange_values``         start sending part i of a first dimension to rank i, and receiving one from each
``shift_values``            start sending a tensor to the next rank, the last one's to the first, and receiving one
==========================  ========================================================================================

Each gives what ``zerofx::wait`` waits for. ``over`` names the axis of the mesh whose ranks take part.
"""

from __future__ import annotations

import torch

from zerofx.ir.op_kernels.fakes import dense
from zerofx.ir.op_kernels.own_operator import own_operator


def _gathered(part: torch.Tensor, num_ranks: int, *, over: str) -> torch.Tensor:
    return part.new_empty(num_ranks, *part.shape)


def _scattered(parts: torch.Tensor, num_ranks: int, *, over: str) -> torch.Tensor:
    return parts.new_empty(parts.shape[1:])


gather_values = own_operator("gather_values(Tensor part, int num_ranks, *, str over) -> Tensor", _gathered)
reduce_scatter_values = own_operator(
    "reduce_scatter_values(Tensor parts, int num_ranks, *, str over) -> Tensor", _scattered
)
all_reduce_values = own_operator(
    "all_reduce_values(Tensor value, str reduction, int num_ranks, *, str over) -> Tensor", dense
)
exchange_values = own_operator("exchange_values(Tensor parts, int num_ranks, *, str over) -> Tensor", dense)
shift_values = own_operator("shift_values(Tensor value, int num_ranks, *, str over) -> Tensor", dense)

VALUE_COLLECTIVES = frozenset({gather_values, reduce_scatter_values, all_reduce_values, exchange_values, shift_values})
