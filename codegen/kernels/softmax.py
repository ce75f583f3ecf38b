"""A cross-entropy by runs of classes: what each row's softmax needs of a run, and the gradient of its logits.

With the logits of classes a to b of all rows in hand, which a matrix product of ATen has made, one read of them
updates each row's running maximum m, the sum s of exp(logit - m), and the target's logit (Milakov and Gimelshein,
arXiv:1805.02867). After the last run log s + m is the logarithm of the softmax's denominator, and a second product
gives the logits again, whose gradients are written in their place.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl

from zerofx.codegen.kernels.current_device import device_guard

COLUMNS = 2048  # logits that a program reads at a time
# Products are rounded with the sums they go into, as Triton 3.9 does by default and 3.10 does not.
LAUNCH = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})


@triton.jit
def chunk_kernel(
    logits, target, before, after, first_class, num_rows, num_classes, row_stride,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: ``after`` is ``before``, a maximum, a sum and a target's logit, with this run of classes."""
    row = tl.program_id(0).to(tl.int64)
    if FIRST:
        largest = -float("inf")
        total = 0.0
        picked = 0.0
    else:
        largest = tl.load(before + row)
        total = tl.load(before + num_rows + row)
        picked = tl.load(before + 2 * num_rows + row)
    begin = logits + row * row_stride
    for start in range(0, num_classes, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        values = tl.load(begin + at, mask=at < num_classes, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(values, 0))
        # Where all is -inf so far, the difference to it would be no number.
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), 0)
        largest = new
    wanted = tl.load(target + row) - first_class
    here = (wanted >= 0) & (wanted < num_classes)
    picked += tl.load(begin + wanted, mask=here, other=0.0).to(tl.float32)
    tl.store(after + row, largest)
    tl.store(after + num_rows + row, total)
    tl.store(after + 2 * num_rows + row, picked)


@triton.jit
def gradient_kernel(
    logits, target, log_sums, scale, first_class, num_classes, row_stride, ignored, COLUMNS: tl.constexpr
):  # fmt: skip
    """Some logits of one row become their gradients."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < num_classes
    wanted = tl.load(target + row)
    factor = tl.where(wanted == ignored, 0.0, tl.load(scale))
    place = logits + row * row_stride + at
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.exp(values - tl.load(log_sums + row))
    hit = (at + first_class) == wanted
    gradient = (softmax - tl.where(hit, 1.0, 0.0)) * factor
    # An ignored row's gradient is zero, also where its logits are not finite.
    tl.store(place, tl.where(wanted == ignored, 0.0, gradient), mask=inside)


def softmax_chunk(
    logits: torch.Tensor, target: torch.Tensor, first_class: int, stats: torch.Tensor | None
) -> torch.Tensor:
    """``zerofx.softmax_chunk`` in one kernel."""
    num_rows, num_classes = logits.shape
    after = logits.new_empty(3, num_rows, dtype=torch.float32)
    if num_rows:
        with device_guard(logits.device):
            chunk_kernel[(num_rows,)](
                logits, target, after if stats is None else stats, after, first_class, num_rows, num_classes,
                logits.stride(0), FIRST=stats is None, COLUMNS=COLUMNS, **LAUNCH,
            )  # fmt: skip
    return after


def softmax_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    first_class: int,
    log_sums: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
) -> None:
    """``zerofx.softmax_gradient`` in one kernel."""
    num_rows, num_classes = logits.shape
    if num_rows:
        with device_guard(logits.device):
            gradient_kernel[(num_rows, triton.cdiv(num_classes, COLUMNS))](
                logits, target, log_sums, scale, first_class, num_classes, logits.stride(0), ignore_index,
                COLUMNS=COLUMNS, **LAUNCH,
            )  # fmt: skip
