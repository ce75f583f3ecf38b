"""A softmax cross-entropy by runs of classes: the arithmetic of the operators in ``zerofx/ir/ops.py``.

For each row, ``stats`` has the largest logit m so far, the sum of exp(logit - m), and the target's logit, in float32
(the online softmax of Milakov and Gimelshein, arXiv:1805.02867). After the last run the loss of a row is

    m + log(sum) - target's logit

and the gradient of a logit is (exp(logit - m - log(sum)) - [it is the target's]) times the scale of its row.
"""

from __future__ import annotations

import torch


def softmax_chunk(
    logits: torch.Tensor, target: torch.Tensor, first_class: int, stats: torch.Tensor | None
) -> torch.Tensor:
    """``zerofx.softmax_chunk``: ``stats`` of shape ``[3, rows]`` with the classes of ``logits`` as well.

    Args:
        logits: of shape ``[rows, classes of this run]``.
        target: a class for each row, of all classes; one that is no class has no logit, and 0 in its place.
        first_class: the class of the first column.
        stats: those of the runs before; None for the first.
    """
    values = logits.to(torch.float32, copy=True)
    largest = values.amax(1)
    if stats is not None:
        largest = torch.maximum(stats[0], largest)
    # Where all is -inf so far, the difference to it would be no number.
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    column, here = _place(target, first_class, logits.shape[1])
    picked = values.gather(1, column).squeeze(1).masked_fill(~here, 0.0)
    total = values.sub_(shift.unsqueeze(1)).exp_().sum(1)
    if stats is not None:
        total = stats[1] * (stats[0] - shift).exp() + total
        picked = stats[2] + picked
    return torch.stack([largest, total, picked])


def softmax_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    first_class: int,
    log_sums: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
) -> None:
    """``zerofx.softmax_gradient``: logits of a run of classes become their gradients.

    Args:
        logits, target, first_class: as for ``softmax_chunk``; ``logits`` is overwritten.
        log_sums: m + log(sum) of each row over all classes, in float32.
        scale: 0-dim, in float32: of the gradients of all rows.
        ignore_index: rows with this target have gradients of zero.
    """
    values = logits.to(torch.float32, copy=True)
    values.sub_(log_sums.unsqueeze(1)).exp_()
    column, here = _place(target, first_class, logits.shape[1])
    values.scatter_add_(1, column, -here.to(torch.float32).unsqueeze(1)).mul_(scale)
    logits.copy_(values.masked_fill_((target == ignore_index).unsqueeze(1), 0.0))


def _place(target: torch.Tensor, first_class: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each row's target, some column where it is elsewhere, and whether it is here."""
    column = target - first_class
    here = (column >= 0) & (column < num_classes)
    return column.clamp(0, num_classes - 1).unsqueeze(1), here
