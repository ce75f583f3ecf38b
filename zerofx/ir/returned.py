"""The extras that a step returns besides its loss, in the structure in which ``forward`` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerofx.ir.batch import Batch
from zerofx.torch_private.dispatch import without_modes


@dataclass(frozen=True)
class Returned:
    """The structure of a micro-batch's results besides its loss.

    ``by_call``: whether the step returns its extras with its loss, as ``forward`` did; else they are its ``outputs``.
    ``extras`` is what ``forward`` returned after its loss, None where it returned its loss alone; what is no tensor in
    it is as it was while the step was captured. Of a view a step gives the memory that it is of: shapes and strides are
    those of the tensors in ``extras``, and ``offsets`` where they begin. Those whose numbers are in ``whole`` are all
    of a memory, or a copy, and are shown as the step gives them. After them come ``num_logged`` tensors that Python
    reads (``capture/values/logged.py``). ``left_out`` describes tensors that a model returned
    besides its loss, and that nobody asked for; of an evaluation, whose extras are all that is returned, what is
    neither a tensor nor a plain value.
    """

    extras: Batch | None = None
    offsets: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    by_call: bool = False
    num_logged: int = 0
    whole: frozenset[int] = frozenset()

    @staticmethod
    def from_extras(extras: Any) -> tuple[Returned, tuple[torch.Tensor, ...]]:
        """The structure of extras, and their tensors.

        Raises:
            UsageError: one of them is neither a tensor nor a plain value.
        """
        returned, tensors = Returned._from_batch(Batch.from_extras(extras))
        return replace(returned, by_call=True), tensors

    @staticmethod
    def from_outputs(outputs: Any, *, numbers_only: bool = False) -> tuple[Returned, tuple[torch.Tensor, ...]]:
        """The structure of all that a forward returns, and its tensors. What cannot be handed out is left out.

        ``numbers_only``: so are tensors of other than one element.
        """
        flattened, left_out = Batch.from_outputs(outputs, numbers_only=numbers_only)
        returned, tensors = Returned._from_batch(flattened)
        return replace(returned, left_out=left_out), tensors

    @staticmethod
    def _from_batch(flattened: Batch) -> tuple[Returned, tuple[torch.Tensor, ...]]:
        tensors = tuple(tensor.detach() for tensor in flattened.tensors)
        with without_modes():  # it is no part of what the forward does
            like = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
        return Returned(
            flattened.replace_tensors(like), tuple(int(tensor.storage_offset()) for tensor in tensors)
        ), tensors

    @property
    def num_tensors(self) -> int:
        """The number of tensors that a micro-batch gives besides its loss."""
        return (0 if self.extras is None else len(self.extras.tensors)) + self.num_logged

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The extras of one micro-batch, of all its tensors."""
        if self.extras is None:
            return None
        tensors = tensors[: len(self.extras.tensors)]
        shown = []
        for index, (tensor, like, offset) in enumerate(zip(tensors, self.extras.tensors, self.offsets, strict=True)):
            is_whole = index in self.whole or (tensor.shape == like.shape and tensor.stride() == like.stride())
            shown.append(tensor if is_whole else tensor.as_strided(like.shape, like.stride(), offset))
        (rebuilt,), _ = self.extras.rebuild(tuple(shown))
        return rebuilt

    def shows(self, index: int, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """True if ``rebuilt`` makes ``part``, a view of the tensor ``whole``, of extra number ``index``."""
        if self.extras is None or index >= len(self.extras.tensors):
            return False
        like = self.extras.tensors[index]
        is_alike = part.shape == like.shape and part.stride() == like.stride()
        is_there = part.storage_offset() == self.offsets[index] and whole.storage_offset() == 0
        return is_alike and is_there and whole.dtype == part.dtype == like.dtype


NOTHING_ELSE = Returned()
