"""Batches of any length on all ranks: padded to rungs, which ranks agree on with one number a step."""

from __future__ import annotations

import gc
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from zerofx.capture.objective.evaluation import Evaluation
from zerofx.capture.objective.token_weighted_loss import COUNTS
from zerofx.errors import UsageError, notify
from zerofx.garbage import limit_garbage_collection
from zerofx.ir.batch import Batch
from zerofx.ladder import AUTO, Ladder, ladder_up_to
from zerofx.lengths.axes import BatchAxes
from zerofx.lengths.filling import Filling, resize
from zerofx.lengths.outputs import PaddedEvaluation
from zerofx.lengths.trial import PaddingTrial, mask_axes
from zerofx.options import CompileOptions
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.plan import Plan

Size = tuple[int, int]
"""Tokens of a rung, and samples of a batch."""

_SIZES = struct.Struct("<qq")  # what ranks tell each other of a batch
_TRYING = "see whether batches can be padded"


@dataclass(frozen=True)
class Sizes:
    """Extremes over all ranks in one step: the most tokens, and the most and the fewest samples."""

    length: int
    samples: int
    fewest: int


@dataclass(frozen=True)
class Rung:
    """A step for batches padded to so many tokens and samples, and the number of its runs."""

    length: int
    samples: int
    plan: Plan
    num_steps: int

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of a rank, including padding."""
        return self.length * self.samples / self.plan.step_seconds


class PaddedBatches:
    """The rungs of one step, and the padding of its batches to them.

    ``axes`` and ``filling`` are known once the first batch has been seen (``settle``). ``known`` has the sizes that
    batches are padded to: those of the ladder, and those of batches with more samples than were known at their rung.
    """

    def __init__(
        self, asked: Ladder | int | Literal["auto"], model: nn.Module, options: CompileOptions, control: Control
    ) -> None:
        self._asked, self._model, self._options, self._control = asked, model, options, control
        self.ladder = Ladder((1,))
        self.axes: BatchAxes | None = None
        self.filling = Filling()
        self.known: list[Size] = []
        self._evaluated: dict[str, PaddedEvaluation | None] = {}
        self._built: dict[Size, Plan] = {}
        self._num_steps = Counter[Size]()

    @property
    def is_settled(self) -> bool:
        """True if a first batch has been seen."""
        return bool(self.known)

    def settle(self, batch: Batch, num_micro_batches: int = 1) -> None:
        """Find what varies in batches, and how to pad them, from the first one. Collective.

        ``num_micro_batches``: the number of micro-batches like this one in a step's batch.

        Raises:
            UsageError: the batch has no length, it is longer than the longest, or the model's batches cannot be padded;
                on all ranks.
        """
        control = self._control
        axes = control.attempt("find the length of a batch", lambda: BatchAxes.from_batch(batch))
        control.agree(
            "compare where tokens are",
            f"{sorted(axes.along.items())} {sorted(axes.samples)}",
            "dimensions with tokens",
            "Prepare the step with a batch that has another number of tokens than of anything else.",
        )
        self.axes = axes
        asked = self._asked
        longest = asked if isinstance(asked, int) else self._agree(batch).length if asked == AUTO else None
        self.ladder = ladder_up_to(longest) if longest is not None else asked  # type: ignore[assignment]  # no word
        sizes = self._agree(batch)
        self._check_length(sizes)
        with limit_garbage_collection():
            self.filling = self._find_filling(batch, axes)
            gc.collect()  # what autograd holds of a trial in cycles: parameters that are about to get values
        if self.filling.makes_mask:
            self.axes = mask_axes(axes)
        self.known = self.ladder.sizes(sizes.samples * num_micro_batches)

    def _find_filling(self, batch: Batch, axes: BatchAxes) -> Filling:
        """The filling for batches on all ranks, found by trials on each."""
        control, rung = self._control, next((rung for rung in self.ladder.rungs if rung > 1), 1)
        trial = control.attempt(_TRYING, lambda: PaddingTrial(self._model, self._options.objective, batch, axes, rung))
        filling, whys = self._first_of(trial, trial.fillings())
        if filling is None:
            raise UsageError(
                f"expected a model whose batches can be padded with lengths=, found {type(self._model).__name__}, for "
                f"which padding counts: {'; '.join(whys)}. Have its loss leave tokens out whose label is "
                f"the loss's ignore_index, or that a mask in the batch has as 0, and attention those that an "
                f"attention_mask has as 0; or leave lengths out, and pad batches as the model needs it"
            )
        return self._first_of(trial, trial.sample_fillings(filling))[0] or filling

    def _first_of(self, trial: PaddingTrial, fillings: Sequence[Filling]) -> tuple[Filling | None, list[str]]:
        """The first filling with which padding counts for nothing on all ranks, or else the reason against each."""
        whys: list[str] = []
        for filling in fillings:
            obstacles = self._control.gather(trial.obstacle(filling), _TRYING)
            if not any(obstacles):
                return filling, []
            whys.append(next(why for why in obstacles if why))
        return None, list(dict.fromkeys(whys))

    def sizes_of(self, batch: Batch) -> Sizes:
        """The sizes over all ranks, agreed on with one number each. Collective.

        Raises:
            UsageError: a batch is longer than the longest rung, on all ranks, or it varies elsewhere, on this one.
        """
        sizes = self._agree(batch)
        self._check_length(sizes)
        return sizes

    def _agree(self, batch: Batch, axes: BatchAxes | None = None) -> Sizes:
        axes = axes or self.axes
        assert axes is not None, "a first batch has been seen"
        with self._control.report_errors():
            mine = axes.sizes(batch)
        notes = self._control.start("agree on a length", note=_SIZES.pack(*mine))()
        of_ranks = [_SIZES.unpack(note[: _SIZES.size]) for note in notes]
        return Sizes(max(n for n, _ in of_ranks), max(n for _, n in of_ranks), min(n for _, n in of_ranks))

    def _check_length(self, sizes: Sizes) -> None:
        if sizes.length > self.ladder.longest:
            raise UsageError(
                f"expected batches of at most {self.ladder.longest} tokens, the longest of lengths=, found one of "
                f"{sizes.length}: cut it, or give lengths up to {sizes.length}"
                + (", or prepare the step with the longest batch first" if self._asked == AUTO else "")
            )

    def size_for(self, sizes: Sizes, *, pads_samples: bool = True) -> Size:
        """The tokens and samples that the batches of all ranks are padded to. ``pads_samples``: to those of a rung too.

        Raises:
            UsageError: there are fewer samples than a step has, in micro-batches whose terms are not counted.
        """
        rung = self.ladder.rung_of(sizes.length)
        enough = [samples for known, samples in self.known if known == rung and samples >= sizes.samples]
        if not (pads_samples and self.filling.pads_samples and enough):
            enough = [sizes.samples]
        size = rung, min(enough)
        options = self._options
        if size[1] > sizes.fewest and options.accumulate != 1 and options.loss_terms is None:
            raise UsageError(
                f"expected loss_terms with lengths= and accumulate={options.accumulate!r} for a batch of fewer samples "
                f"than {size[1]}, found a batch of {sizes.fewest} without: micro-batches of unequal numbers of samples "
                f"are weighed by them; give zerofx.compile loss_terms, or leave the batch out"
            )
        if size not in self.known:
            self.known.append(size)
        return size

    def pad(self, batch: Batch, size: Size) -> Batch:
        """The batch, padded to ``size``: tokens and samples."""
        assert self.axes is not None, "a first batch has been seen"
        length, samples = size
        if not self.filling.pads_samples:
            samples = self.axes.sizes(batch)[1]
        return self.filling.pad(self.filling.add_mask(batch, self.axes), self.axes, length, samples)

    def pad_alike(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Pad micro-batches to the tokens and samples of the largest. Each keeps its loss.

        Raises:
            UsageError: they have different numbers of samples, and the loss cannot leave samples out.
        """
        assert self.axes is not None, "a first batch has been seen"
        sizes = [self.axes.sizes(batch) for batch in batches]
        lengths, samples = zip(*sizes, strict=True)
        if len(set(samples)) > 1 and not self.filling.pads_samples:
            raise UsageError(
                f"expected micro-batches of the same number of samples, found {list(samples)}: give those of others "
                f"to a model whose loss leaves labels out"
            )
        return [self.pad(batch, (max(lengths), max(samples))) for batch in batches]

    def evaluation(self, batch: Batch) -> tuple[PaddedEvaluation, Size] | None:
        """The padding for evaluating a batch, and its tokens and samples; None for no padding. Collective.

        If batches like it cannot be padded, a warning says why, once; one beyond the longest rung is not padded.
        """
        form = self.form(batch)
        if form not in self._evaluated:
            self._evaluated[form] = self._try_to_evaluate(batch, form)
        padding = self._evaluated[form]
        if padding is None:
            return None
        sizes = self._agree(batch, padding.axes)
        if sizes.length > self.ladder.longest:
            return None
        return padding, padding.size_for(self.ladder.rung_of(sizes.length), sizes.samples)

    def _try_to_evaluate(self, batch: Batch, form: str) -> PaddedEvaluation | None:
        rung = next((rung for rung in self.ladder.rungs if rung > 2), 0)
        trial, why = None, "no rung has three tokens or more" * (not rung)
        try:
            axes = BatchAxes.from_batch(batch)
            trial = PaddingTrial(self._model, Evaluation(self._options.objective), batch, axes, rung) if rung else None
        except Exception as error:  # noqa: BLE001 - all ranks are told
            why = f"in a trial {type(error).__name__} is raised: {error}"
        whys = [entry for entry in self._control.gather(why, _TRYING) if entry]
        if not whys and trial is not None:
            filling, whys = self._first_of(trial, trial.fillings())
            if filling is not None:
                with_samples = self._first_of(trial, trial.sample_fillings(filling))[0]
                if with_samples is None:
                    self._first_of(trial, [filling])  # what outputs follow, once more
                return PaddedEvaluation(
                    form, mask_axes(axes) if filling.makes_mask else axes, with_samples or filling, trial.output_dims
                )
        notify(
            f"batches are evaluated with as many tokens as they have, and each length captured apart, since padding "
            f"would count: {'; '.join(dict.fromkeys(whys))}"
        )
        return None

    def example(self, batch: Batch, size: Size) -> Batch:
        """A batch of a size, made of another batch's values, to build a step with."""
        assert self.axes is not None, "a first batch has been seen"
        return resize(self.filling.add_mask(batch, self.axes), self.axes, *size)

    def spread(self, batch: Batch, num_samples: int, num_micro_batches: int) -> Batch:
        """A padded batch whose micro-batches get the ``num_samples`` real samples in turn.

        A micro-batch without samples repeats the last sample, with no terms counted, so that its loss is a number.
        """
        assert self.axes is not None, "a first batch has been seen"
        samples = batch.size()
        if num_micro_batches == 1 or num_samples == samples:
            return batch
        each = samples // num_micro_batches
        rows, counted = [], []
        for slot in range(samples):
            part, position = divmod(slot, each)
            own = position * num_micro_batches + part
            counted.append(own < num_samples)
            rows.append(own if own < num_samples else num_samples if part < num_samples else num_samples - 1)
        device = batch.tensors[0].device
        index, keeps = torch.tensor(rows, device=device), torch.tensor(counted, device=device)
        tensors = []
        for name, tensor in zip(batch.names, batch.tensors, strict=True):
            dealt = tensor[index] if name in self.axes.samples else tensor
            tensors.append(dealt * keeps if name == COUNTS else dealt)
        return batch.replace_tensors(tuple(tensors))

    def note(self, batch: Batch, plan: Plan, *, has_run: bool) -> None:
        """Record the plan of a padded batch and its runs, for reports."""
        assert self.axes is not None, "a first batch has been seen"
        size = self.axes.sizes(batch)
        self._built[size] = plan
        self._num_steps[size] += has_run

    def is_built(self, batch: Batch) -> bool:
        """True if there is a step for batches padded like this one."""
        assert self.axes is not None, "a first batch has been seen"
        return self.axes.sizes(batch) in self._built

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs for which there is a step, the shortest first."""
        return tuple(Rung(*size, self._built[size], self._num_steps[size]) for size in sorted(self._built))

    def form(self, batch: Batch) -> str:
        """All properties of a batch except its varying sizes, as a text."""
        return replace(batch, tensors=tuple(t.new_empty(()) for t in batch.tensors)).signature()
