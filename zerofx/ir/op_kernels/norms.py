"""Norms of many gradients: the sum of their squares, ``square_sum``, and the largest magnitude, ``largest``.

Norms of rows of ``ROW`` values are taken in float32, as torch takes norms, and their squares added up in float64. So
the error is that of a row, less than 1e-5 of the sum, for any number of values; ``torch.linalg.vector_norm`` of three
million values in float32 was off by 6e-5. The order of the sum depends on the number of values alone.
"""

from __future__ import annotations

import torch

ROW = 4096
_BLOCK = 1024 * ROW  # values that are taken at once: their conversion to float32 is all that is held


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of flat ``values``, float64, shape ``[1]``; not finite where a value is not."""
    total = torch.zeros(1, dtype=torch.float64, device=values.device)
    for block in values.split(_BLOCK):
        whole = block.numel() // ROW * ROW
        for rows in (block[:whole].view(-1, ROW), block[whole:].view(1, -1)):
            if rows.numel():
                norms = torch.linalg.vector_norm(rows, dim=1, dtype=norm_dtype(rows.dtype))
                total += norms.double().square_().sum()
    return total


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude among flat ``values``, float64, shape ``[1]``; infinite or NaN exactly where a value is."""
    most: torch.Tensor = torch.linalg.vector_norm(values, torch.inf)
    return most.double().reshape(1)


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms of values of ``dtype``: float32, or float64 for those."""
    return torch.promote_types(dtype, torch.float32)


def square_sum_workspace_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``square_sum`` holds on a CPU beyond its result, at its worst moment."""
    numel = min(numel, _BLOCK)
    wide, num_rows = norm_dtype(dtype), max(1, numel // ROW)
    size = numel // ROW * ROW or numel
    norms = num_rows * wide.itemsize
    converted = 0 if dtype == wide else size * wide.itemsize
    squares = 0 if wide == torch.float64 else num_rows * 8
    return norms + max(converted, squares + 8)
