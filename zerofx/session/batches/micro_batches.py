"""Micro-batches that are brought one by one, put together to the batch of a step; terms of losses on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofx.capture.objective.token_weighted_loss import total_terms
from zerofx.errors import UsageError
from zerofx.ir.batch import Batch
from zerofx.ir.ops import NO_BUCKET
from zerofx.ir.streams import axes_text
from zerofx.runtime.executor import Runtime


class MicroBatches:
    """Those that wait for the step's update: its loss, gradients and update are computed from all of them then.

    ``alike`` gives those of one update the same shapes, if that is to be; without it they have them.
    """

    def __init__(
        self, num_micro_batches: int | str, alike: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None
    ) -> None:
        self._wanted, self._waiting, self._alike = num_micro_batches, list[Batch](), alike

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, batch: Batch) -> None:
        """Keep one more.

        Raises:
            UsageError: the step takes another number of them, or it is unlike those that wait.
        """
        if not isinstance(self._wanted, int):
            raise UsageError(
                f"expected accumulate to be the number of step.micro() calls before each step.update(), found "
                f"{self._wanted!r}: give zerofx.compile that number"
            )
        if len(self._waiting) == self._wanted:
            raise UsageError(
                f"expected step.update() after {self._wanted} micro-batches, as accumulate={self._wanted} says, found "
                f"one more"
            )
        if self._alike is None and self._waiting and self._waiting[0].description() != batch.description():
            raise UsageError(
                f"expected micro-batches of one form, found ({self._waiting[0].signature()}) and then "
                f"({batch.signature()}): give those of one update the same shapes, for example by padding"
            )
        self._waiting.append(batch)

    def take(self, *, partial: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the step for those that have waited; none do then. ``partial``: they may be fewer.

        Raises:
            UsageError: some are missing, or differ in a tensor that is not divided.
        """
        if len(self._waiting) != self._wanted and not (partial and self._waiting):
            raise UsageError(
                f"expected step.update() after accumulate={self._wanted} calls of step.micro(), found "
                f"{len(self._waiting)}{'' if partial else ': say update(partial=True) where data ends earlier'}"
            )
        whole = _join(self._alike(self._waiting) if self._alike is not None else self._waiting)
        self._waiting = []
        return whole

    def check_empty(self, doing: str) -> None:
        """Check that none wait.

        Raises:
            UsageError: some do.
        """
        if self._waiting:
            raise UsageError(
                f"expected to {doing} after step.update(), found {len(self._waiting)} of {self._wanted} micro-batches "
                f"waiting for it"
            )


def _join(batches: Sequence[Batch]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first = batches[0]
    divided = first.divided_names()
    tensors = []
    for name, parts in zip(first.names, zip(*(batch.tensors for batch in batches), strict=True), strict=True):
        if name in divided:
            tensors.append(torch.cat(parts))
        elif all(part is parts[0] or torch.equal(part, parts[0]) for part in parts):
            tensors.append(parts[0])
        else:
            raise UsageError(
                f"expected {name}, whose first size is not the batch's, to be the same in all micro-batches of an "
                f"update, found other values: give it a first dimension of {first.size()}"
            )
    return first.rebuild(tuple(tensors))


def count_all(batch: Batch, runtime: Runtime) -> None:
    """Let a batch that counts the terms of its loss know those of all ranks. Collective, where it does."""
    total = total_terms(batch)
    if total is not None and runtime.mesh.num_ranks > 1:
        axes = axes_text(runtime.mesh.world)
        pending = runtime.all_gather(total.reshape(1), NO_BUCKET, runtime.mesh.num_ranks, over=axes)
        total.copy_(runtime.wait(pending).sum())
