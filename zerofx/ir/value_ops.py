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

_library = torch.library.Library("zerofx", "FRAGMENT")  # torch unregisters the operators when this object goes
_library.define("gather_values(Tensor part, int num_ranks, *, str over) -> Tensor")
_library.define("reduce_scatter_values(Tensor parts, int num_ranks, *, str over) -> Tensor")
_library.define("all_reduce_values(Tensor value, str reduction, int num_ranks, *, str over) -> Tensor")
_library.define("exchange_values(Tensor parts, int num_ranks, *, str over) -> Tensor")
_library.define("shift_values(Tensor value, int num_ranks, *, str over) -> Tensor")


def _gathered(part: torch.Tensor, num_ranks: int, *, over: str) -> torch.Tensor:
    return part.new_empty(num_ranks, *part.shape)


def _scattered(parts: torch.Tensor, num_ranks: int, *, over: str) -> torch.Tensor:
    return parts.new_empty(parts.shape[1:])


def _alike(value: torch.Tensor, *_args: object, over: str) -> torch.Tensor:
    return value.new_empty(value.shape)


for _name, _fake in (
    ("gather_values", _gathered),
    ("reduce_scatter_values", _scattered),
    ("all_reduce_values", _alike),
    ("exchange_values", _alike),
    ("shift_values", _alike),
):
    _library.impl(_name, _fake, "Meta")

gather_values = torch.ops.zerofx.gather_values.default
reduce_scatter_values = torch.ops.zerofx.reduce_scatter_values.default
all_reduce_values = torch.ops.zerofx.all_reduce_values.default
exchange_values = torch.ops.zerofx.exchange_values.default
shift_values = torch.ops.zerofx.shift_values.default

VALUE_COLLECTIVES = frozenset({gather_values, reduce_scatter_values, all_reduce_values, exchange_values, shift_values})
