"""A batch in micro-batches: which of its tensors are divided, and the step that runs them one after the other."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from zerofx.capture.by_layer.by_layer import RecordedForward, capture_by_layer, record_and_look_up
from zerofx.capture.by_layer.forward_record import ForwardRecord
from zerofx.capture.by_size import KnownSizes
from zerofx.capture.for_gpu.gpu import AbsentGpu
from zerofx.capture.traceable import Forward
from zerofx.disk.cache import DiskCache
from zerofx.ir.batch import Batch
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.parameters import Strides
from zerofx.option_checks import has_stages
from zerofx.options import STOPPING, CompileOptions
from zerofx.passes.prepare.overlap import overlap
from zerofx.passes.prepare.stages import end_forward
from zerofx.pipeline import PreparationInputs, run_preparations
from zerofx.scheduler.plan.decisions import MovedNodes, ProductDecision, ShardingDecision, TileDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import Settings


class Captures:
    """The step of one batch in any number of micro-batches, each captured when it is asked for first.

    ``candidates`` are the numbers that may be planned for, the least first: the divisors of the batch size where the
    number is left to the plan, and a memory budget, or stages, give it a reason to take more than one. ``strides`` and
    ``gpu`` as for ``capture``, ``sizes`` as for ``capture_by_layer``. ``verbose``: whether this rank writes how it was
    captured, where ``ZEROFX_DEBUG`` asks for passes.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        options: CompileOptions,
        settings: Settings,
        strides: Strides = MappingProxyType({}),
        *,
        gpu: AbsentGpu | None = None,
        verbose: bool = False,
        sizes: KnownSizes | None = None,
    ) -> None:
        self._model, self._batch, self._options, self._settings = model, batch, options, settings
        self._strides, self._gpu, self._sizes = strides, gpu, sizes
        self._writes = verbose and settings.debug > 0
        self._captured: dict[int, StepGraph] = {}  # of one micro-batch each, before it is unrolled
        self._of_rank: dict[int, StepGraph] = {}  # likewise, of one rank of the model axis
        self._unrolled: dict[tuple[int, bool], StepGraph] = {}
        self._recorded: dict[int, RecordedForward] = {}
        self.candidates: Sequence[int] = _candidates(batch, options)
        self.slices: tuple[TileDecision, ...] = ()
        self.shardings: tuple[ShardingDecision, ...] = ()
        self.overlaps: tuple[MovedNodes, ...] = ()
        self.products: Mapping[int, tuple[ProductDecision, ...]] = {}
        self.num_parts = 1
        self.pipe: PipeStage | None = None
        self._uncut: Captures | None = None  # of all stages, where this is one of them

    def only(self, num_micro_batches: int) -> Captures:
        """The same where only this number is planned for."""
        chosen = copy.copy(self)
        chosen.candidates = (num_micro_batches,)
        return chosen

    def slice_parameters(self, slices: tuple[TileDecision, ...]) -> Captures:
        """The same step with parameters in slices.

        Raises:
            PlanError: one of them cannot be worked with so.
        """
        if slices == self.slices:
            return self
        sliced = copy.copy(self)
        sliced.slices, sliced._unrolled = slices, {}
        return sliced

    def share(self, shardings: tuple[ShardingDecision, ...], num_parts: int) -> Captures:
        """The same step as one of ``num_parts`` ranks of the model axis runs it.

        Raises:
            PlanError: a decision is about something that the graph has not.
        """
        shared = copy.copy(self)
        shared.shardings, shared.num_parts, shared._of_rank, shared._unrolled = shardings, num_parts, {}, {}
        return shared

    def before_stages(self) -> Captures:
        """The same step of one rank, whose results are there before backward begins."""
        early = copy.copy(self)
        if self.num_parts > 1:
            step = self.rank_graph(self.candidates[0]).clone()
            end_forward(step)
            early._of_rank, early._unrolled = {self.candidates[0]: step}, {}
        return early

    def stage_captures(self, pipe: PipeStage) -> Captures:
        """The same step as ranks with one place on the axis pipe run it.

        Raises:
            UsageError: it cannot run in stages.
        """
        staged = copy.copy(self)
        staged.pipe, staged._uncut, staged._of_rank, staged._unrolled = pipe, self, {}, {}
        return staged

    def delay_weights(self, lag: int | None) -> Captures:
        """The same stage with weight gradients so many turns after the rest of backward; None: with it."""
        assert self.pipe is not None and self._uncut is not None, "stages take turns"
        return self if lag == self.pipe.weights_lag else self._uncut.stage_captures(replace(self.pipe, weights_lag=lag))

    def number_buckets(self, chunks: Sequence[Sequence[int]]) -> Captures:
        """The same stage with the numbers of its trained buckets among all: those of a chunk are of one stage, in
        order. ``chunks``: of each stage's buckets."""
        assert self.pipe is not None, "of a stage"
        pipe = self.pipe.number_buckets(chunks)
        if pipe == self.pipe:
            return self
        numbered = copy.copy(self)
        numbered.pipe = pipe
        numbered._of_rank = {num: _number(step, pipe) for num, step in self._of_rank.items()}
        numbered._unrolled = {key: _number(step, pipe) for key, step in self._unrolled.items()}
        return numbered

    def reorder(self, overlaps: tuple[MovedNodes, ...]) -> Captures:
        """The same step of one rank in another order.

        Raises:
            PlanError: a decision is about something that the graph has not.
        """
        ordered = copy.copy(self)
        ordered.overlaps, ordered._unrolled = overlaps, {}
        ordered._of_rank = {num: step.clone() for num, step in self._of_rank.items()}
        for step in ordered._of_rank.values():
            overlap(step, overlaps)
        return ordered

    def multiply(self, products: Mapping[int, tuple[ProductDecision, ...]]) -> Captures:
        """The same step of one rank with these products in fp8, by the number of micro-batches.

        Raises:
            PlanError: a decision is about something that the graph has not.
        """
        if products == self.products:
            return self
        low = copy.copy(self)
        low.products, low._of_rank, low._unrolled = products, {}, {}
        return low

    def short(self, num_micro_batches: int, step: StepGraph) -> Captures:
        """The same where ``step``, a part of the captured one, stands for all of it, which is what is verified."""
        short = copy.copy(self)
        short._settings = replace(self._settings, verify=0)
        short._captured, short.candidates = {num_micro_batches: step}, (num_micro_batches,)
        short._of_rank, short._unrolled = {}, {}
        return short

    def record(self) -> RecordedForward | None:
        """The record of the forward, and the place of its graph in the cache.

        None where nothing is kept, where the graph is to be compared with a capture, where more numbers of
        micro-batches than one may be planned for, and where the forward cannot be recorded.
        """
        cache = DiskCache(self._settings.cache_dir)
        if cache.folder is None or self._settings.verify == 2 or len(self.candidates) != 1:
            return None
        num = self.candidates[0]
        if num not in self._recorded:
            try:
                self._recorded[num] = record_and_look_up(self._forward(num), cache)
            except Exception:  # noqa: BLE001 - what the model's own code raises is explained where it is captured
                return None
        return self._recorded[num]

    def drop_batch(self) -> Captures:
        """The same step, whose graph has been read, without what it takes to run the model."""
        graphs = copy.copy(self)
        nowhere = tuple(tensor.to("meta") for tensor in self._batch.tensors)
        graphs._batch = replace(self._batch, tensors=nowhere, call=((), {}))
        graphs._recorded = {
            num: replace(recorded, record=ForwardRecord((), "", None)) for num, recorded in self._recorded.items()
        }
        return graphs

    @property
    def first(self) -> StepGraph:
        """The captured step for the least number."""
        return self.graph(self.candidates[0])

    def graph(self, num_micro_batches: int, *, by_layer: bool = False) -> StepGraph:
        """The captured step, which is not to be edited.

        Raises:
            UsageError: the batch cannot be divided so.
            PlanError: a parameter cannot be worked with in the slices that are asked for.
            CaptureError: the model cannot be captured.
        """
        key = num_micro_batches, by_layer
        if key not in self._unrolled:
            step = self.rank_graph(num_micro_batches)
            if self.slices or num_micro_batches > 1:
                step = step.clone()
                divided = self.batch_names_to_divide(num_micro_batches)
                given = PreparationInputs(
                    slices=self.slices, num_micro_batches=num_micro_batches, divided=divided, by_layer=by_layer
                )
                run_preparations(step, self._settings, given)
            step.guarded = self.guarded
            self._unrolled[key] = step
        return self._unrolled[key]

    def rank_graph(self, num_micro_batches: int) -> StepGraph:
        """The captured step of one of so many micro-batches, as one rank runs it, which is not to be edited.

        Raises: as ``graph``.
        """
        products = self.products.get(num_micro_batches, ())
        if self.num_parts == 1 and self.pipe is None and not products:
            return self.whole_graph(num_micro_batches)
        if num_micro_batches not in self._of_rank and self.pipe is not None:
            assert self._uncut is not None, "a stage is cut out of a whole step"
            step = self._uncut.rank_graph(num_micro_batches).clone()
            run_preparations(step, self._settings, PreparationInputs(pipe=self.pipe))
            self._of_rank[num_micro_batches] = step
        if num_micro_batches not in self._of_rank:
            step = self.whole_graph(num_micro_batches).clone()
            given = PreparationInputs(
                shardings=self.shardings, overlaps=self.overlaps, num_parts=self.num_parts,
                fp8=self._options.precision.fp8 or "", products=products,
            )  # fmt: skip
            run_preparations(step, self._settings, given)
            self._of_rank[num_micro_batches] = step
        return self._of_rank[num_micro_batches]

    def whole_graph(self, num_micro_batches: int) -> StepGraph:
        """The captured step of one of so many micro-batches, of whole values, which is not to be edited.

        Raises: as ``graph``.
        """
        if num_micro_batches not in self._captured:
            self._captured[num_micro_batches] = self._capture(num_micro_batches)
        return self._captured[num_micro_batches]

    @property
    def guarded(self) -> bool:
        """True if steps end before their updates when a loss is not finite."""
        return self._options.on_nonfinite in STOPPING

    def batch_names_to_divide(self, num: int) -> frozenset[str]:
        """The batch tensors that ``num`` micro-batches divide."""
        return self._batch.divided_names() if num > 1 else frozenset()

    def _capture(self, num: int) -> StepGraph:
        step = self.capture_one(num)
        lent = self._options.objective.free_tensors.lent
        held = {name: infos for lender in lent for name, infos in lender.storage_parts().items()}
        given = PreparationInputs(traced=True, loss_scaled=self._options.loss_scale is not None, held=held)
        run_preparations(step, self._settings, given)
        return step

    def capture_one(self, num: int) -> StepGraph:
        """The graph of one of ``num`` micro-batches before it is prepared, captured at each call."""
        return capture_by_layer(
            self._forward(num), allowed="stamp" not in self._settings.disable, check=self._settings.verify == 2,
            say=self._say, cache=DiskCache(self._settings.cache_dir), recorded=self._recorded.get(num),
            sizes=self._sizes,
        )  # fmt: skip

    def _forward(self, num: int) -> Forward:
        options = self._options
        return Forward(
            self._model,
            self._batch.first_of(num),
            options.objective,
            options.casts(self._model),
            num,
            self._strides,
            self._gpu,
        )

    def _say(self, text: str) -> None:
        if self._writes:
            sys.stderr.write(f"{text}\n")


def _number(step: StepGraph, pipe: PipeStage) -> StepGraph:
    assert step.pipe is not None, "of a stage"
    return replace(step, pipe=replace(step.pipe, buckets=pipe.buckets, num_buckets=pipe.num_buckets))


def _candidates(batch: Batch, options: CompileOptions) -> tuple[int, ...]:
    if isinstance(options.plan, Plan):
        return (options.plan.num_micro_batches,)
    if options.accumulate != "auto":
        return (options.accumulate,)
    if options.memory_budget is None and not has_stages(options.mesh):
        return (1,)
    size = batch.size()
    return tuple(num for num in range(1, size + 1) if size % num == 0)
