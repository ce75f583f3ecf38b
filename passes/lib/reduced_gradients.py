"""Gradients that are summed over ranks: their divisors, and the slice that is this rank's alone."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.graph import StepGraph


def divisors(dtype: torch.dtype, num_ranks: int) -> tuple[int, float]:
    """Divisors of gradients of ``dtype``, before their sum over the ranks and of the sum.

    Where float16 is reduced both parts are near the root of the number of ranks, so that neither small values nor
    large sums leave its range (as in ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``).
    """
    if dtype is not torch.float16:
        return 1, num_ranks
    first = 1
    while num_ranks % first == 0 and num_ranks / first > first:
        first *= 2
    rest = num_ranks / first
    return first, int(rest) if rest.is_integer() else rest


def own_slice(step: StepGraph, bucket: Bucket) -> fx.Node:
    """This rank's own slice of a bucket's reduced gradient, which at stage 0 is gathered from all ranks again."""
    own = step.reduced[bucket.index]
    while isinstance(gather := own.args[0], fx.Node) and gather.target is ops.all_gather_into:
        assert isinstance(gather.args[1], fx.Node)
        own = gather.args[1]
    return own
