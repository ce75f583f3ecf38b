"""Outputs of padded batches: which of their dimensions have the padding, and what they are without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Pair = tuple[int, int]
"""A size without padding, and with it."""


@dataclass(frozen=True)
class Follows:
    """The dimensions of an output that have a batch's tokens, and those that have its samples."""

    tokens: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    def cut(self, output: Tensor, length: int, samples: int) -> Tensor:
        """The output of so many tokens and samples: a view."""
        for dims, size in ((self.tokens, length), (self.samples, samples)):
            for dim in dims:
                output = output.narrow(dim, 0, size)
        return output


def followed(without: Sequence[Tensor], padded: Sequence[Tensor], lengths: Pair, samples: Pair) -> list[Follows] | str:
    """What the outputs of a padded batch follow, or which of them does otherwise.

    It is told from the sizes that change, of which none is both tokens and samples.
    """
    if len(without) != len(padded):
        return f"{len(without)} outputs are {len(padded)} when they are padded"
    follows = []
    for number, (own, other) in enumerate(zip(without, padded, strict=True)):
        changed = {
            dim: pair for dim, pair in enumerate(zip(own.shape, other.shape, strict=False)) if len(set(pair)) > 1
        }
        is_told = own.dim() == other.dim() and all(pair in (lengths, samples) for pair in changed.values())
        if not is_told or (changed and lengths == samples):
            return f"output {number} of shape {list(own.shape)} is one of {list(other.shape)} when they are padded"
        tokens = tuple(dim for dim, pair in changed.items() if pair == lengths)
        follows.append(Follows(tokens, tuple(dim for dim in changed if dim not in tokens)))
    return follows
