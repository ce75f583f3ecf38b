"""Losses that are means over unequal numbers of terms: weighted so that a step's loss is the mean over all terms.

A micro-batch of few valid tokens counts as much as one of many where losses are averaged. ``loss_terms(*batch)`` gives
the number of loss terms of each sample of a batch; the loss of a micro-batch is then multiplied by

    its terms * number of ranks / terms of all micro-batches of all ranks

instead of 1 / number of micro-batches: gradients, which ranks average, are those of the mean over all terms. The parts
of the factor are tensors of the batch, so that a step is captured once: counts are whole numbers, which no compute
dtype rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from zerofx.errors import UsageError
from zerofx.ir.batch import Batch

# Keywords that a step adds to those of its batch: no name of Python's, so no model's.
_COUNTS, _TOTAL, _RANKS = "terms of the loss", "terms on all ranks", "number of ranks"

LossTerms = Callable[..., torch.Tensor]

COUNTS = f"**[{_COUNTS!r}]"
"""What a batch calls how many terms each of its samples has, int64, shape ``[samples]``."""


def add_term_counts(
    loss_terms: LossTerms | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_ranks: int,
    added: Collection[str] = (),
) -> dict[str, Any]:
    """Add the weights of a loss to ``kwargs``: its terms by sample, on this rank, and the number of ranks.

    ``added``: keywords that the step has added, which ``loss_terms`` does not know.

    Raises:
        UsageError: ``loss_terms`` does not give a whole number for each sample.
    """
    if loss_terms is None:
        return dict(kwargs)
    with torch.no_grad():
        counts = loss_terms(*args, **{name: value for name, value in kwargs.items() if name not in added})
    num_samples = Batch.from_call(args, kwargs).size()
    if (
        not isinstance(counts, torch.Tensor)
        or counts.shape != (num_samples,)
        or counts.is_floating_point()
        or counts.is_complex()
    ):
        given = f"{counts.dtype} {list(counts.shape)}" if isinstance(counts, torch.Tensor) else type(counts).__name__
        raise UsageError(
            f"expected loss_terms(*batch) to give how many terms of the loss each of {num_samples} samples has, as "
            f"whole numbers of shape [{num_samples}], found {given}: for labels of shape [samples, tokens], "
            f"(labels != -100).sum(-1)"
        )
    counts = counts.long()
    ranks = torch.full((), num_ranks, device=counts.device)  # which a GPU fills without the host waiting for it
    return {**kwargs, _COUNTS: counts, _TOTAL: counts.sum(), _RANKS: ranks}


def total_terms(batch: Batch) -> torch.Tensor | None:
    """The number of terms, int64, shape ``[]``, if the batch has it: this rank's until the sum replaces it."""
    named = zip(batch.names, batch.tensors, strict=True)
    return next((tensor for name, tensor in named if name == f"**[{_TOTAL!r}]"), None)


def pop_term_counts(kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Remove the weights that ``add_term_counts`` added to ``kwargs``; empty if there are none."""
    return tuple(kwargs.pop(name) for name in (_COUNTS, _TOTAL, _RANKS)) if _COUNTS in kwargs else ()


def weigh_loss(loss: torch.Tensor, counts: torch.Tensor, total: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Multiply the loss by its share of all terms, computed in float32, or in float64 for a loss in that."""
    return loss * (counts.sum().to(torch.promote_types(loss.dtype, torch.float32)) * ranks / total)
