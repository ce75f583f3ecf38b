"""Numbers about the step that ran last, for loggers: each is looked up, or waited for, when it is read."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerofx.ir.batch import Batch
from zerofx.ir.op_kernels.row_routes import most_shares
from zerofx.runtime.comm.comparisons import check_equal
from zerofx.runtime.comm.control import Control
from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.operators import pytree


class Metrics(Mapping[str, float]):
    """Names and numbers. Nothing is waited for before a number is read; what was read stays."""

    def __init__(self, numbers: Mapping[str, Callable[[], float] | float]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name]
        if callable(number):
            number = self._numbers[name] = number()
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return repr(dict(self))


class LastStep:
    """Numbers of the step that ran last: its loss, how long it took, and how much was in its batch."""

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._sizes: Mapping[str, int] = {}
        self._seconds: Callable[[], float] | None = None
        self._norms: Mapping[str, Callable[[], float]] = {}
        self._shares: Sequence[torch.Tensor] = ()

    @contextlib.contextmanager
    def time_step(self, device: torch.device) -> Iterator[None]:
        """A step runs inside, which has been built. Nothing is waited for."""
        self._seconds = None  # of a step that is left amid
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._seconds = lambda: _elapsed_seconds(begin, end)
            return
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._seconds = lambda: seconds

    def note(self, loss: torch.Tensor, batch: Batch, mesh: Mesh) -> None:
        """Keep a step's loss, shape ``[]``, and the sizes of its batch."""
        self._loss, self._sizes = loss, sizes_of(batch, mesh)

    def note_layers(self, layers: Sequence[str], squares: torch.Tensor | None) -> None:
        """Keep the sums of squares of gradients, shape ``[len(layers)]``, of what is part of these layers; or none."""
        self._norms = {} if squares is None else _norms(layers, squares)

    def note_rows(self, shares: Sequence[torch.Tensor]) -> None:
        """Keep the most rows of experts that a rank had for another, in each micro-batch; none where none were sent."""
        self._shares = shares

    def metrics(
        self,
        num_steps: int,
        num_skipped: int,
        rows: Mapping[str, float],
        grad_norm: torch.Tensor | None,
        loss_scale: float | None,
        known: Measurement | Plan | None,
    ) -> Metrics:
        """All numbers, with those about ``rows`` of experts; ``known`` has what was measured, or else planned, of the
        step, if it has been built."""
        numbers: dict[str, Callable[[], float] | float] = {"step": num_steps}
        if self._loss is not None:
            numbers["loss"] = self._loss.item
        if self._seconds is not None:
            numbers["seconds"] = self._seconds
            numbers |= {f"{name}_per_second": _rate(size, self._seconds) for name, size in self._sizes.items()}
        if grad_norm is not None:
            numbers["grad_norm"] = grad_norm.item
        numbers |= {f"grad_norm/{layer}": norm for layer, norm in self._norms.items()}
        if loss_scale is not None:
            numbers["loss_scale"] = loss_scale
        numbers |= {"skipped_steps": num_skipped, **rows}
        if self._shares:
            numbers["row_shares"] = functools.partial(most_shares, self._shares)
        if known is not None:
            numbers |= {"peak_bytes": known.peak_bytes["device"], "exposed_seconds": known.exposed_seconds}
        return Metrics(numbers)


def average(values: Any, control: Control) -> Any:
    """``values`` with each number in it, or tensor of one element, as its mean over all ranks. Collective.

    Raises:
        RankMismatchError: ranks have other numbers of them.
    """
    leaves, structure = pytree.tree_flatten(values)
    numbers = [float(leaf) if _is_number(leaf) else None for leaf in leaves]
    of_ranks = control.gather([number for number in numbers if number is not None], "average numbers")
    check_equal(list(map(len, of_ranks)), "how many numbers there are", "Give every rank the same ones.")
    means = (math.fsum(of_each) / control.num_ranks for of_each in zip(*of_ranks, strict=True))
    shown = [leaf if number is None else next(means) for leaf, number in zip(leaves, numbers, strict=True)]
    return pytree.tree_unflatten(shown, structure)


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() == 1 and not leaf.is_complex()
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _norms(layers: Sequence[str], squares: torch.Tensor) -> dict[str, Callable[[], float]]:
    """The norm of each layer's gradients, which the host waits for once, for the first that is read."""

    @functools.cache
    def norms() -> dict[str, float]:
        sums = dict.fromkeys(layers, 0.0)
        for layer, square in zip(layers, squares.tolist(), strict=True):
            sums[layer] += square
        return {layer: math.sqrt(total) for layer, total in sums.items()}

    return {layer: functools.partial(lambda name: norms()[name], layer) for layer in dict.fromkeys(layers)}


def _rate(size: int, seconds: Callable[[], float]) -> Callable[[], float]:
    return lambda: size / seconds()


def _elapsed_seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def sizes_of(batch: Batch, mesh: Mesh) -> dict[str, int]:
    """Samples of all ranks in a step, if a batch says how many it has, and tokens, where its first tensor has them.

    Ranks that share one computation have one batch; all others are taken to have as many samples as this one.
    """
    first = next((tensor for tensor in batch.tensors if tensor.dim()), None)
    if first is None:
        return {}
    num_batches = mesh.num_batches
    sizes = {"samples": num_batches * first.shape[0]}
    if first.dim() == 2 and not first.is_floating_point() and not first.is_complex():
        sizes["tokens"] = num_batches * first.numel()
    return sizes
