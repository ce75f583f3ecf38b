"""Batches of any length: padded to the rungs of ``lengths=``, each of which has a step of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerofx.driver.driver import find_kept_plan, fits_budget
from zerofx.errors import MemoryBudgetError
from zerofx.ir.batch import Batch
from zerofx.lengths.padded_batches import PaddedBatches, Size
from zerofx.lowering.load import CompiledStep
from zerofx.progress import watch_progress
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.mesh import Mesh

if TYPE_CHECKING:
    from zerofx.session.steps import Steps


class Rungs:
    """The rungs that ``steps`` has steps for; without ``lengths=`` a batch stays as it is."""

    def __init__(self, steps: Steps, control: Control) -> None:
        self._steps, self._control = steps, control

    def fit(self, batch: Batch, num_micro_batches: int | None = None) -> Batch:
        """The batch, padded to a rung where ``lengths=`` asks for that. Collective then.

        ``num_micro_batches``: of how many it is; one of fewer than ``accumulate`` says keeps its samples.

        Raises:
            UsageError: it cannot be padded, on all ranks.
            MemoryBudgetError: as ``prepare_all``.
        """
        lengths = self._steps.lengths
        if lengths is None:
            return batch
        self._begin(lengths, batch)
        is_whole = num_micro_batches in (None, self._steps.options.accumulate)
        return lengths.pad(batch, lengths.size_for(lengths.sizes_of(batch), pads_samples=is_whole))

    def pad_alike(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of one update, padded to the same tokens and samples. Collective before the first step.

        Raises:
            UsageError: they cannot be padded.
        """
        lengths = self._steps.lengths
        assert lengths is not None, "batches of any length are asked for"
        if not lengths.is_settled:
            with self._steps.allow_capture():
                lengths.settle(self._steps.batch_of(*batches[0].call), len(batches))
        return lengths.pad_alike(batches)

    def deal(self, batch: Batch, given: Batch, compiled: CompiledStep) -> Batch:
        """A ``batch`` that was ``given`` with fewer samples, dealt out to the micro-batches of its step."""
        lengths = self._steps.lengths
        if lengths is None or batch is given:
            return batch
        return lengths.spread(batch, given.size(), compiled.plan.num_micro_batches)

    def prepare_all(self, batch: Batch) -> None:
        """Build the steps of all rungs, the one that takes the most first, and load that of a batch.

        Raises:
            UsageError: the model's batches cannot be padded.
            MemoryBudgetError: not all rungs fit the budget; says which is the longest that does.
        """
        lengths = self._steps.lengths
        if lengths is not None:
            self._begin(lengths, batch)
            with watch_progress(
                "preparing lengths", "lengths", len(lengths.known), show=self._control.rank == 0
            ) as bar:
                for size in lengths.known:
                    self._prepare_rung(lengths, lengths.example(batch, size))
                    bar.update()
        self.prepare(batch)
        self._steps.build_deferred_kernels()

    def prepare(self, batch: Batch) -> None:
        """Build the step of a batch alone, and where there is none yet that of the rung that takes the most.

        Raises:
            ZeroFXError: as ``prepare_all``.
        """
        self._build(self.fit(batch))

    def choose_mesh(self, batch: Batch) -> Mesh:
        """The mesh that steps run on, chosen for the rung that takes the most where it is to be. Collective then.

        Raises:
            ZeroFXError: as ``prepare_all``.
        """
        lengths = self._steps.lengths
        if lengths is not None:
            self._settle(lengths, batch)
            batch = lengths.example(batch, lengths.known[0])
        return self._steps.choose_mesh(batch)

    def _settle(self, lengths: PaddedBatches, batch: Batch) -> None:
        if not lengths.is_settled:
            with self._steps.allow_capture():
                lengths.settle(batch)

    def _build(self, batch: Batch) -> None:
        self._steps.step_for(batch, "prepare a step").agreement.wait()

    def _prepare_rung(self, lengths: PaddedBatches, example: Batch) -> None:
        """Build the step of a rung, unless an earlier run has: that is loaded when it is first met."""
        steps = self._steps
        if not lengths.is_built(example):
            assert steps.taken is not None, "the first rung has been built"
            with steps.allow_capture():
                plan = find_kept_plan(steps.request(example), steps.taken.earlier, self._control)
            if plan is not None:
                lengths.note(example, plan, has_run=False)
                return
        self._build(example)

    def _begin(self, lengths: PaddedBatches, batch: Batch) -> None:
        """Build the step of the rung that takes the most first: its buckets are those of all."""
        self._settle(lengths, batch)
        if self._steps.taken is not None:
            return
        first, *others = lengths.known
        try:
            self._build(lengths.example(batch, first))
        except MemoryBudgetError as error:
            longest = self._longest_that_fits(lengths, batch, others)
            if longest is None:
                raise
            raise MemoryBudgetError(
                f"{error}. Of lengths= the longest that fits is {longest}, not {first[0]}: give lengths up to "
                f"{longest}, or a larger memory_budget"
            ) from error

    def _longest_that_fits(self, lengths: PaddedBatches, batch: Batch, sizes: Sequence[Size]) -> int | None:
        """The tokens of the first of ``sizes``, of which each takes less than the one before, that has a plan within
        the budget."""

        def fits(size: Size) -> bool:
            with self._steps.allow_capture():
                return fits_budget(self._steps.request(lengths.example(batch, size)), self._control)

        index = bisect_left(sizes, True, key=fits)
        return sizes[index][0] if index < len(sizes) else None
