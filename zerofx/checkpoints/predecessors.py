"""Whose place of a checkpoint a rank takes: what each rank has of its own are generators, buffers and ``state=``."""

from __future__ import annotations


def predecessor(rank: int, num_model: int, saved_ranks: int, saved_model: int) -> int | None:
    """The saved rank whose own values ``rank`` goes on with; None where there was no such rank.

    ``num_model`` ranks in a row share one computation, and did ``saved_model`` of ``saved_ranks``. Where these are as
    many, each rank goes on with its own. Otherwise all ranks of the n-th group go on with what the first rank of the
    n-th saved group had.
    """
    before = rank if num_model == saved_model else rank // num_model * saved_model
    return before if before < saved_ranks else None
