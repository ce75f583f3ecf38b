"""Outputs of padded batches, in training and evaluation: the dimensions that have the padding, and their true sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zerofx.ir.batch import Batch
from zerofx.lengths.axes import BatchAxes
from zerofx.lengths.filling import Filling

Pair = tuple[int, int]
"""A size without padding, and with it."""


@dataclass(frozen=True)
class OutputDims:
    """The dimensions of an output that vary with a batch's tokens, and those that vary with its samples."""

    tokens: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    def cut(self, output: Tensor, length: int, samples: int) -> Tensor:
        """A view of the output with so many tokens and samples."""
        for dims, size in ((self.tokens, length), (self.samples, samples)):
            for dim in dims:
                output = output.narrow(dim, 0, size)
        return output


def find_output_dims(
    without: Sequence[Tensor], padded: Sequence[Tensor], lengths: Pair, samples: Pair
) -> list[OutputDims] | str:
    """The varying dimensions of a padded batch's outputs, or a text naming an output for which they are unclear.

    They are found from the sizes that change; no size may be both tokens and samples.
    """
    if len(without) != len(padded):
        return f"{len(without)} outputs are {len(padded)} when they are padded"
    output_dims = []
    for number, (own, other) in enumerate(zip(without, padded, strict=True)):
        changed = {
            dim: pair for dim, pair in enumerate(zip(own.shape, other.shape, strict=False)) if len(set(pair)) > 1
        }
        is_told = own.dim() == other.dim() and all(pair in (lengths, samples) for pair in changed.values())
        if not is_told or (changed and lengths == samples):
            return f"output {number} of shape {list(own.shape)} is one of {list(other.shape)} when they are padded"
        tokens = tuple(dim for dim, pair in changed.items() if pair == lengths)
        output_dims.append(OutputDims(tokens, tuple(dim for dim in changed if dim not in tokens)))
    return output_dims


@dataclass(frozen=True)
class PaddedEvaluation:
    """Padding for evaluated batches. ``form``: all properties of a batch but its varying sizes, as a text.
    ``output_dims``: the varying dimensions of outputs. ``known``: the tokens and samples that batches were padded to.
    """

    form: str
    axes: BatchAxes
    filling: Filling
    output_dims: tuple[OutputDims, ...]
    known: list[tuple[int, int]] = field(default_factory=list)

    def size_for(self, rung: int, samples: int) -> tuple[int, int]:
        """The tokens and samples to pad batches to that have at most ``samples``."""
        enough = [known for of, known in self.known if of == rung and known >= samples]
        size = rung, min(enough) if enough and self.filling.pads_samples else samples
        if size not in self.known:
            self.known.append(size)
        return size

    def pad(self, batch: Batch, size: tuple[int, int]) -> Batch:
        """The batch, padded to ``size``: tokens and samples."""
        return self.filling.pad(self.filling.add_mask(batch, self.axes), self.axes, *size)

    def cut(self, outputs: Any, batch: Batch) -> Any:
        """The outputs of ``batch``, which was padded, without the padding."""
        length, samples = self.axes.sizes(batch)
        flattened, _ = Batch.from_outputs(outputs)
        cut = [d.cut(out, length, samples) for d, out in zip(self.output_dims, flattened.tensors, strict=True)]
        return flattened.replace_tensors(tuple(cut)).call[0][0]
