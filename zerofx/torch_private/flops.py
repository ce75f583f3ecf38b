"""FLOPs of calls, by torch's registry of formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zerofx.torch_private.versions import TORCH


def flop_count(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """What the registry counts for a call of an operator that it has, with tensors that may be fakes."""
    arguments = _with_as_many_heads(packet, args) if refuses_grouped_heads() else args
    return int(flop_registry[packet](*arguments, **kwargs, out_val=result))


def refuses_grouped_heads() -> bool:
    """Whether the registry counts no attention whose keys have fewer heads than its queries, as in torch 2.11."""
    return TORCH == (2, 11)


def _with_as_many_heads(packet: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Keys and values of attention with a head for each of the queries: the kernels compute as if they had them."""
    name = str(packet)
    if "scaled_dot_product" not in name:
        return args
    first = 1 if "backward" in name else 0  # after the gradient
    query, *others = args[first : first + 3]
    repeated = [torch.empty((x.shape[0], query.shape[1], *x.shape[2:]), device="meta") for x in others]
    return [*args[: first + 1], *repeated, *args[first + 3 :]]
