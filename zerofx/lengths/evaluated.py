"""How batches of one form are padded to be evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerofx.ir.batch import Batch
from zerofx.lengths.axes import BatchAxes
from zerofx.lengths.filling import Filling
from zerofx.lengths.outputs import Follows


@dataclass(frozen=True)
class PaddedEvaluation:
    """``form``: what the batches have besides the sizes that vary, as a text. ``follows``: what each output has of
    those. ``known``: the tokens and samples that batches were padded to."""

    form: str
    axes: BatchAxes
    filling: Filling
    follows: tuple[Follows, ...]
    known: list[tuple[int, int]] = field(default_factory=list)

    def size_for(self, rung: int, samples: int) -> tuple[int, int]:
        """The tokens and samples to pad batches to that have at most ``samples``."""
        enough = [known for of, known in self.known if of == rung and known >= samples]
        size = rung, min(enough) if enough and self.filling.pads_samples else samples
        if size not in self.known:
            self.known.append(size)
        return size

    def padded(self, batch: Batch, size: tuple[int, int]) -> Batch:
        """The batch with so many tokens and samples."""
        return self.filling.padded(self.filling.with_mask(batch, self.axes), self.axes, *size)

    def cut(self, outputs: Any, batch: Batch) -> Any:
        """The outputs of the batch that was padded, without what belongs to padding."""
        length, samples = self.axes.sizes(batch)
        flattened, _ = Batch.of_outputs(outputs)
        cut = [follows.cut(out, length, samples) for follows, out in zip(self.follows, flattened.tensors, strict=True)]
        return flattened.holding(tuple(cut)).call[0][0]
