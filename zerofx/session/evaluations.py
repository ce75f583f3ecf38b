"""A model evaluated where its step has it: each batch shape's forward as a planned graph of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofx.capture.cache import per_call_settings
from zerofx.capture.objective.evaluation import Evaluation, evaluation_mode
from zerofx.capture.replay import Replay
from zerofx.checkpoints.random_states import random_states, set_random_states
from zerofx.driver.driver import build_step
from zerofx.driver.prepared import freeze_layout, request_to_evaluate
from zerofx.errors import UsageError
from zerofx.ir.batch import Batch
from zerofx.lengths.outputs import PaddedEvaluation
from zerofx.lengths.padded_batches import Size
from zerofx.lowering.load import CompiledStep
from zerofx.runtime.cuda_graphs.graphed import GraphedSteps
from zerofx.runtime.measure.measure import Measurement, Meter
from zerofx.runtime.state.arguments import batch_tensors
from zerofx.session.batches.agreement import Agreement, forward_parts
from zerofx.session.life import Life
from zerofx.session.shapes import BatchKey, Shapes
from zerofx.session.steps import Steps
from zerofx.session.stopped import leave_evaluation
from zerofx.session.taken_over import TakenOver


class Evaluations:
    """The evaluations of one model, by batch shape and by where its parameters and states lie.

    ``shapes`` has those that were built. ``graphs`` launches their kernels.
    """

    def __init__(self, model: nn.Module, steps: Steps, life: Life, graphs: GraphedSteps) -> None:
        self._model, self._steps, self._life, self._graphs = model, steps, life, graphs
        self.shapes = Shapes(steps.options.max_shapes)
        self._meter: Meter | None = None
        self._replay: Replay | None = None  # of the latest forward

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_runs: int) -> Measurement:
        """Measure the evaluation of a batch, run ``num_runs`` times. Collective.

        Raises:
            ZeroFXError: as where it is evaluated.
        """
        self(args, kwargs)  # what is taken on first use counts for none
        compiled, taken = self.shapes.latest, self._steps.taken
        assert compiled is not None and taken is not None, "it has just run"
        meter = self._meter = Meter(taken.device, num_runs)
        try:
            for _ in range(num_runs):
                with meter.whole_step():
                    self(args, kwargs)
        finally:
            meter.close()
            self._meter = None
        return meter.result(compiled.lowered.graph, taken.layout.freeze(), compiled.plan.stage)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Evaluate a batch: the result of the model's forward, ``loss_fn`` or ``forward=``, detached. Collective.

        Raises:
            UsageError: the model has not been taken over yet.
            ZeroFXError: the evaluation cannot be built or run.
        """
        taken = self._steps.taken
        if taken is None:
            raise UsageError(
                "expected to evaluate a model whose step has been prepared, found that none has been yet: call "
                "step.prepare(batch) with a batch to train on first, or give zerofx.compile an example_batch"
            )
        given = self._steps.batch_of(args, kwargs, counts=False)
        # Before ranks agree to evaluate: in that each may read what the others have.
        with self._life.control.report_errors():
            taken.runtime.tiers.finish_updates()
            self._steps.lenders.finish_updates()
        padding = self._padding(given)
        batch = given if padding is None else padding[0].pad(given, padding[1])
        compiled, agreement = self._evaluation_for(batch, taken, None if padding is None else padding[0].form)
        random = random_states(taken.device)
        try:
            tensors = self._run(compiled, batch, taken, agreement)
            self._steps.run_again(self._replay, self.shapes, compiled, tensors)
            outputs = compiled.extras(tensors, as_list=False)
            return outputs if padding is None else padding[0].cut(outputs, given)
        except BaseException as error:
            failure = leave_evaluation(taken, self._life, error)
            if failure is not error:
                raise failure from error
            raise
        finally:
            set_random_states(random, taken.device)

    def _padding(self, batch: Batch) -> tuple[PaddedEvaluation, Size] | None:
        """The padding of a batch by ``lengths=``, and the size it gets. Collective, where it is asked for."""
        lengths = self._steps.lengths
        if lengths is None:
            return None
        with self._steps.allow_capture():  # a trial runs the model
            return lengths.evaluation(batch)

    def _evaluation_for(self, batch: Batch, taken: TakenOver, form: str | None) -> tuple[CompiledStep, Agreement]:
        """The evaluation of a batch, built if need be, and all ranks' agreement to run it.

        ``form``: what the batch has besides the sizes that vary, where it was padded.
        """
        with evaluation_mode(self._model):
            setting = {"training mode": self._steps.modes.mode()} | per_call_settings()
        key = BatchKey(batch.description(), setting, form)
        locations, lenders = taken.state.locations(), self._steps.lenders
        objective = Evaluation(self._steps.options.objective)
        match = self._steps.find(self.shapes, key, f"{locations}\n{lenders.key}", batch, objective)
        agreement = self._steps.begin_agreement(
            "call step.evaluate(batch)", batch, lambda: forward_parts(key, lenders.key, match)
        )
        compiled = match.compiled
        if compiled is None:
            agreement.wait()
            self._steps.announce(self.shapes, key, match)
            with self._steps.allow_capture():
                request = request_to_evaluate(self._steps.request(batch), batch, locations)
                compiled = build_step(request, freeze_layout(taken.earlier), self._life.control).compiled
            taken.open_links(compiled)
            lenders.agree(taken.state)
            variant = f"{locations}\n{lenders.key}"
            match = self._steps.keep(self.shapes, key, variant, compiled, batch, objective, {})
            self._steps.defer_kernels()
            self._steps.build_deferred_kernels()
        self.shapes.latest, self._replay = compiled, match.replay
        lenders.settle(agreement.wait)
        return compiled, agreement

    def _run(self, compiled: CompiledStep, batch: Batch, taken: TakenOver, agreement: Agreement) -> list[torch.Tensor]:
        """The tensors that an evaluation gives."""
        seeds, mesh = self._steps.seeds, self._steps.mesh
        if compiled.draws_together:
            seeds.begin(taken.device, mesh, agreement.wait, draws_together=True)
        taken.runtime.begin({}, agreement.wait)
        with torch.no_grad():
            state = taken.tensors(compiled.arguments)
            tensors = batch_tensors(compiled.arguments, batch, self._steps.options.compute_dtype)
            outcome = self._graphs.run(compiled, taken.runtime, state, tensors, self._meter)
        taken.runtime.end()
        assert isinstance(outcome, tuple), "what stands for a loss is handed out once more"
        return list(outcome[1:])
