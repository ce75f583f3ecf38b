"""Try on a small batch whether a model's batches can be padded; nothing is trained."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from zerofx.capture.checks import device_of
from zerofx.capture.objective.evaluation import evaluation_mode
from zerofx.capture.objective.loss import Objective
from zerofx.capture.objective.token_weighted_loss import COUNTS, pop_term_counts
from zerofx.capture.traceable import preserve_randomness
from zerofx.ir.batch import Batch
from zerofx.lengths.axes import BatchAxes
from zerofx.lengths.filling import MASK, Filling, cut
from zerofx.lengths.outputs import OutputDims, find_output_dims
from zerofx.lengths.uses import SpreadParameters, Uses
from zerofx.torch_private.modules import buffer_table

_IGNORED = -100  # torch's own default of a label that is left out
_MOST_SAMPLES = 2
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Relative; rounding of sums that are taken in another order. Padding that counts changes a mean by a part of itself.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5}
_LOW_ROUNDING = 2e-2
_SAME_SHAPE = 0.1  # of that, where sums are of the same shapes


class PaddingTrial:
    """The loss of a few samples without padding, in evaluation mode, to compare with their loss when padded.

    For an ``Evaluation`` it compares all outputs, without padding; ``output_dims`` has the padded dimensions, as the
    last filling showed them. ``rung``: the number of tokens to pad to; the samples have about half as many. Parameters
    are rescaled (``SpreadParameters``).
    """

    def __init__(self, model: nn.Module, objective: Objective, batch: Batch, axes: BatchAxes, rung: int) -> None:
        self._model, self._objective, self._axes = model, objective, axes
        length, samples = axes.sizes(batch)
        self._spread = SpreadParameters(device_of(model))
        self._rung, self._length = rung, min(length, rung // 2 + 1)
        self._samples = min(samples, _MOST_SAMPLES)
        small = cut(batch, axes, self._length, self._samples)
        self._uses = self._run(small)[1]
        self._labels = self._labels_of(small)
        self._small = small.replace_tensors(tuple(
            tensor.masked_fill(tensor == self._labels[name], 0) if name in self._labels else tensor
            for name, tensor in zip(small.names, small.tensors, strict=True)
        ))  # fmt: skip
        self._expected, uses = self._run(self._small)
        self._has_nan = uses.has_nan
        self.output_dims: tuple[OutputDims, ...] = ()

    def fillings(self) -> Sequence[Filling]:
        """Candidates for padding tokens, in the order of trial."""
        named = dict(zip(self._small.names, self._small.tensors, strict=True))
        plain = Filling(self._labels, pads_samples=False)
        candidates = [plain]
        flags = {name: 1 for name in self._axes.along if named[name].dtype == torch.bool}
        if flags:
            candidates.append(replace(plain, values=self._labels | flags))
        if MASK not in self._small.names and _accepts_mask(self._objective.forward or self._model.forward):
            candidates.append(replace(plain, makes_mask=True))
        return candidates

    def sample_fillings(self, filling: Filling) -> Sequence[Filling]:
        """Candidates for padding samples too, if ``filling`` pads tokens."""
        labels = {name for name in self._labels if name in self._axes.samples} | {COUNTS}
        weights = {name for name in self._axes.along if name not in self._uses.looked_up}
        return [
            replace(filling, masked=frozenset(masked), pads_samples=True)
            for masked in dict.fromkeys((frozenset(labels), frozenset(labels | weights)))
        ]

    def obstacle(self, filling: Filling) -> str:
        """The reason why batches cannot be padded with ``filling``; empty if they can."""
        if self._objective.trains and (statistics := self._statistics()):
            return f"{statistics} normalises by the statistics of all tokens of a batch, padding among them"
        samples = self._samples + filling.pads_samples
        other = replace(filling, values={**filling.values, **self._other_ids()})
        results = []
        for tried in (filling, other):
            try:
                outputs, uses = self._run(
                    tried.pad(tried.add_mask(self._small, self._axes), mask_axes(self._axes), self._rung, samples)
                )
            except Exception as error:  # noqa: BLE001 - all ranks are told, where no other filling does
                return f"the forward of a padded batch raises {type(error).__name__}: {error}"
            if uses.has_nan and not self._has_nan:
                return "the forward of a padded batch has NaN in it"
            results.append(outputs)
        pairs = (self._length, self._rung), (self._samples, samples)
        output_dims = find_output_dims(self._expected, results[0], *pairs)
        if isinstance(output_dims, str):
            return f"in a trial {output_dims}, to {samples} samples of {self._rung} tokens"
        self.output_dims = tuple(output_dims)
        first, second = (
            tuple(of.cut(out, self._length, self._samples) for of, out in zip(output_dims, outputs, strict=True))
            for outputs in results
        )
        for outputs, expected, part in ((first, self._expected, 1.0), (second, first, _SAME_SHAPE)):
            for output, wanted in zip(outputs, expected, strict=True):
                if not _close(output, wanted, part):
                    return (
                        f"in a trial {self._difference_text(wanted, output)} when they are padded to {samples} samples "
                        f"of {self._rung} tokens" + ("" if part == 1 else ", with other ids for what is added")
                    )
        return ""

    def _difference_text(self, expected: torch.Tensor, padded: torch.Tensor) -> str:
        of = f"of {self._samples} samples of {self._length} tokens"
        if self._objective.trains:
            return f"the loss {of} is {float(expected)}, and {float(padded)}"
        return f"an output of shape {list(expected.shape)} {of} has other values"

    def _other_ids(self) -> dict[str, int]:
        """Other padding values for tensors that are only looked up, which must not matter."""
        named = zip(self._small.names, self._small.tensors, strict=True)
        return {name: int(tensor.max()) for name, tensor in named if name in self._uses.looked_up and tensor.numel()}

    def _labels_of(self, small: Batch) -> dict[str, int]:
        """The ignored target values of a loss, by the names of the target tensors."""
        labels = dict(self._uses.ignored)
        for name, tensor in zip(small.names, small.tensors, strict=True):
            is_whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
            is_named = "label" in name or "target" in name
            if is_whole and is_named and name not in self._uses.looked_up and name not in labels:
                labels[name] = _IGNORED
        return {name: value for name, value in labels.items() if name in small.names}

    def _statistics(self) -> str:
        """A module that computes statistics over its whole input in training mode; empty for none."""
        norms = (name for name, part in self._model.named_modules() if isinstance(part, _NORMS) and part.training)
        return next(norms, "")

    def _run(self, batch: Batch) -> tuple[tuple[torch.Tensor, ...], Uses]:
        """The loss of a batch, or its outputs, and the uses of its values. Buffers and generators are restored."""
        args, kwargs = batch.rebuild(batch.tensors)
        pop_term_counts(kwargs)
        uses = Uses(dict(zip(batch.names, batch.tensors, strict=True)), self._spread)
        model = self._model
        with (
            preserve_randomness(device_of(model)),
            _buffers_kept(model),
            evaluation_mode(model),
            torch.enable_grad(),
            uses,
        ):
            loss, _, outputs = self._objective.run(model, args, kwargs, contextlib.nullcontext)
        results = (loss,) if self._objective.trains else outputs
        return tuple(result.detach() for result in results), uses


def mask_axes(axes: BatchAxes) -> BatchAxes:
    """The axes of batches that are given a mask."""
    if MASK in axes.along:
        return axes
    return BatchAxes({**axes.along, MASK: (1,)}, axes.samples | {MASK}, {**axes.fixed, MASK: (0, 0)})


def _accepts_mask(called: object) -> bool:
    """True if a forward names ``attention_mask`` among its arguments."""
    try:
        return MASK in inspect.signature(called).parameters  # type: ignore[arg-type]  # what cannot be called raises
    except (TypeError, ValueError):
        return False


def _close(loss: torch.Tensor, expected: torch.Tensor, part: float) -> bool:
    """True if losses, or outputs, are equal up to a ``part`` of rounding, relative to the largest of them."""
    if not expected.numel():
        return True
    rounding = _ROUNDING.get(expected.dtype, _LOW_ROUNDING) * part
    precise = torch.complex128 if expected.is_complex() else torch.float64
    wanted = expected.to(precise)
    return bool((loss.to(precise) - wanted).abs().max() <= rounding * wanted.abs().max() + 1e-12)


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """While open, a forward may change or replace buffers; afterwards they are restored."""
    tables = [buffer_table(module) for module in model.modules()]
    before = [
        {name: (buffer, buffer.clone()) for name, buffer in table.items() if buffer is not None} for table in tables
    ]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            for name, (buffer, values) in entries.items():
                table[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
