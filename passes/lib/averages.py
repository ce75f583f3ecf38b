"""What a sum over ranks is divided by for an average, before it is taken and after."""

from __future__ import annotations

import torch


def divisors(dtype: torch.dtype, num_ranks: int) -> tuple[int, float]:
    """What gradients of ``dtype`` are divided by before their sum over the ranks is taken, and what the sum is after.

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
