"""The compiled step: what ``zerofx.compile`` returns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn

from zerofx.checkpoints.random_states import random_states, set_random_states
from zerofx.driver.asked import describe_request
from zerofx.errors import NonFiniteGradientsError, NonFiniteLossError, RowOverflowError, UsageError, wrap_defects
from zerofx.ir.batch import Batch
from zerofx.lowering.load import CompiledStep
from zerofx.optimizers import Optimizers
from zerofx.options import CompileOptions
from zerofx.passes.barrier.keep_gradients import kept_buckets
from zerofx.pipeline import check_disabled
from zerofx.runtime.cuda_graphs.capturing import CudaCapturer
from zerofx.runtime.cuda_graphs.graphed import GraphedSteps
from zerofx.runtime.measure.measure import Measurement, Meter
from zerofx.runtime.state.arguments import batch_tensors
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.session.batches.micro_batches import MicroBatches, count_all
from zerofx.session.batches.rungs import Rungs
from zerofx.session.ending import end, end_connections
from zerofx.session.evaluations import Evaluations
from zerofx.session.guards import LossWatch
from zerofx.session.lending.owners import claim, release
from zerofx.session.life import Life
from zerofx.session.metrics import LastStep
from zerofx.session.reported import Reported
from zerofx.session.steps import RUNNING, Steps
from zerofx.session.stopped import leave_out, skip, take_back, undo
from zerofx.session.taken_over import TakenOver
from zerofx.session.whole import Whole
from zerofx.settings import ShortTraceback, read_settings


class Step(Whole, Reported):
    """A training step: ``loss = step(*batch, **kwargs)`` runs forward, backward, reduction and update.

    It returns this rank's loss, detached, shape ``[]``: the update has been done, or runs on where the host does it
    until something reads what it changes, and ``loss.backward()`` is neither needed nor possible. The first call with a
    batch of some shape captures and plans a step for it; further calls with that shape run it. Ranks call it together.

    Where ``forward`` returns a pair, so does the step: ``loss, extras = step(*batch)``. The tensors of ``extras`` are
    this rank's, detached, on their device; with ``accumulate`` other than 1, ``extras`` is a list of what each
    micro-batch gives, and None for a step that was left out. What else a model returns besides its loss is in
    ``step.outputs``, as far as ``outputs=`` asks for it; the rest is computed only where the loss needs it, and not
    kept: ``print(step)`` lists it.

    An error before the step runs leaves model and optimizer as they were. An error while it runs (an index out of
    range, no memory) leaves them as they were too if no bucket had been updated yet, which a note on the error says; on
    more than one rank the step cannot be used after that.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, options: CompileOptions) -> None:
        self.model = model
        self.settings = read_settings()
        check_disabled(self.settings)
        self.num_steps = 0
        # Steps that on_nonfinite="skip" or the scale of the loss has left out, which ``num_steps`` does not count.
        self.num_skipped = 0
        # Times that a step was run again, as rows of experts had found no room on their ranks.
        self.num_repeated = 0
        self._losses = LossWatch()
        self._meter: Meter | None = None
        self._measured: tuple[CompiledStep, Measurement] | None = None
        self._grad_norm: torch.Tensor | None = None
        self._last = LastStep()
        self._outputs: Any = None
        self._gradients: Mapping[int, torch.Tensor] = {}
        self._sent = {}
        self._later = None
        owner = weakref.proxy(self)  # a step that is dropped goes at once
        self._graphs = GraphedSteps(
            lambda: CudaCapturer(owner._steps.device),
            lambda compiled: owner._steps.graph_obstacle(compiled),
            required=options.cuda_graphs is True,
        )
        self._owner = claim(model, self)
        with contextlib.ExitStack() as undo_all:
            undo_all.callback(release, model, self._owner)
            self._life = Life(self.settings.timeout_seconds)
            self._control = self._life.control
            undo_all.callback(self._control.leave)
            self._control.agree(
                "call zerofx.compile",
                describe_request(model, optimizers, options, self.settings),
                "model, optimizer and options",
                "Compile the same on every rank.",
            )
            self._steps = Steps(model, optimizers, options, self.settings, self._life, self._owner)
            self.options = self._steps.options
            self._rungs = Rungs(self._steps, self._life.control)
            alike = None if options.lengths is None else self._rungs.pad_alike
            self._micro_batches = MicroBatches(options.accumulate, alike)
            self._evaluations = Evaluations(model, self._steps, self._life, self._graphs)
            self._steps.before_give_back = lambda: owner._drop_built_steps()
            undo_all.pop_all()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            "expected a step to be neither copied nor pickled, found that it was, though memory and connections "
            "are those of this process: call step.save_checkpoint(folder), or copy the model and "
            "optimizer.state_dict() inside `with step.full_parameters():`"
        )

    # ------------------------------------------------------------------------------------------------ running

    @ShortTraceback()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._micro_batches.check_empty("call step(batch)")
        with self._life.turn("run a step", self._steps.device):
            return self._run(args, kwargs)

    @ShortTraceback()
    def micro(self, *args: Any, **kwargs: Any) -> None:
        """Bring one of the micro-batches that ``update`` trains on, for loops that do not have a whole batch at once.

        They are as many as ``accumulate`` says, and alike in shape unless ``lengths=`` pads them. Nothing is computed
        yet, so the model is as it was, and their tensors must not change until ``update``.

        Raises:
            UsageError: there are more of them, or it is unlike the others.
        """
        self._life.check_open("call step.micro(batch)")
        with self._life.claim("keep a micro-batch"), wrap_defects("keep a micro-batch"):
            self._micro_batches.add(Batch.from_call(args, kwargs))

    @ShortTraceback()
    def update(self, *, partial: bool = False) -> Any:
        """Train on the micro-batches that ``micro`` has brought; returns what ``step(batch)`` does for all of them.

        ``partial``: they may be fewer than ``accumulate`` says, as where data ends. The loss is their mean; each number
        of them is captured and planned once, as a batch of another shape is.

        Raises:
            UsageError: there are not as many as ``accumulate`` says.
        """
        self._life.check_open("call step.update()")
        num = len(self._micro_batches)
        with wrap_defects("put micro-batches together"):
            args, kwargs = self._micro_batches.take(partial=partial)
        with self._life.turn("run a step", self._steps.device):
            return self._run(args, kwargs, num)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_micro_batches: int | None = None) -> Any:
        self._life.check_open("call step(batch)")
        self._outputs, self._gradients = None, {}  # which have no place in the plan of another step
        if self._later is not None:
            self._later.tidy()
        given = self._steps.batch_of(args, kwargs)
        batch = self._rungs.fit(given, num_micro_batches)
        ready = self._steps.step_for(batch, RUNNING, num_micro_batches)
        compiled, taken, advance, agreed = ready.compiled, ready.taken, ready.advance, ready.agreement.wait
        batch = self._rungs.deal(batch, given, compiled)
        taken.place(compiled.plan)
        self._steps.seeds.begin(taken.device, self._steps.mesh, agreed, draws_together=compiled.draws_together)
        versions = taken.versions()
        random = random_states(taken.device) if compiled.plan.sends_rows else {}
        advance.swap(taken.state)
        try:
            with self._last.time_step(taken.device), torch.no_grad():
                taken.runtime.begin(advance.values, agreed, advance.whole)
                taken.runtime.begin_with_equal_buffers(compiled)
                results = self._compute(compiled, taken, batch)
                taken.runtime.end()
        except RowOverflowError as overflow:
            self._steps.gradients.put()
            take_back(taken, advance, versions)
            set_random_states(random, taken.device)
            shares = self._control.gather(overflow.shares, "make room for rows of experts")
            self._steps.rows.widen(max(shares), self._steps.mesh.model)
            self.num_repeated += 1
            return self._run(args, kwargs, num_micro_batches)
        except NonFiniteGradientsError:
            self._steps.gradients.put()
            left = skip(self.num_steps + 1, taken, advance, versions)
            self.num_skipped += 1
            return self._results_of_call(compiled, taken, left)
        except NonFiniteLossError as error:
            self._steps.gradients.put()
            raises = self.options.on_nonfinite == "raise"
            loss = leave_out(self.num_steps + 1, taken, self._life, advance, versions, error, raises=raises)
            self.num_skipped += 1
            return (loss, None) if compiled.returned.by_call else loss
        except BaseException as error:
            failure = undo(self.num_steps + 1, taken, self._life, advance, versions, error)
            if failure is not error:
                raise failure from error
            raise
        self._steps.gradients.put()
        self._last.note(results[0], given, self._steps.mesh)
        self._count(results[0])
        self._steps.rows.note_run(taken.runtime.undealt_shares)
        taken.update_scale(is_finite=True)
        taken.finish_step(self.options.delayed_update or 0, self.num_steps, compiled.plan)
        self._steps.seeds.end(taken.device)
        for effect in self._steps.effects:
            effect.make()
        return self._results_of_call(compiled, taken, results)

    def _compute(self, compiled: CompiledStep, taken: TakenOver, batch: Batch) -> list[torch.Tensor]:
        count_all(batch, taken.runtime)
        state = taken.tensors(compiled.arguments)
        tensors = batch_tensors(compiled.arguments, batch, self.options.compute_dtype)
        outcome = self._graphs.run(compiled, taken.runtime, state, tensors, self._meter)
        return list(outcome) if isinstance(outcome, tuple) else [outcome]

    def _drop_built_steps(self) -> None:
        """Before the model is taken over anew."""
        self.finish_saving()
        self._graphs.clear()
        self._evaluations.shapes.forget()

    def _results_of_call(self, compiled: CompiledStep, taken: TakenOver, outcome: list[torch.Tensor]) -> Any:
        """The results of a call, from a step's outcome; the norm of gradients is noted."""
        loss, *others = outcome
        self._gradients = {b.index: others.pop() for b in reversed(kept_buckets(taken.layout, compiled.plan))}
        squares = others.pop() if self.options.grad_norms else None
        self._last.note_layers(taken.layers, squares)
        self._grad_norm = others.pop() if self.options.max_grad_norm is not None else None
        self._last.note_rows(compiled.row_shares(others))
        self._steps.run_again(self._steps.replay, self._steps.shapes, compiled, others)
        if compiled.returned.extras is None:
            return loss
        extras = compiled.extras(others, as_list=self.options.accumulate != 1)
        if compiled.returned.by_call:
            return loss, extras
        self._outputs = extras
        return loss

    def _count(self, loss: torch.Tensor) -> None:
        self.num_steps += 1
        self._losses.add(self.num_steps, loss)
        self._losses.warn(self._control.rank)

    @ShortTraceback()
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and compile the step for a batch of this shape without running it.

        With ``lengths=`` those of all rungs, the longest first, whatever the batch's length.

        Raises:
            MemoryBudgetError: no plan fits the budget; says which of ``lengths=`` is the longest that does.
        """
        self._life.check_open("prepare a step")
        with self._life.turn("prepare a step", self._steps.device):
            self._rungs.prepare_all(self._steps.batch_of(args, kwargs))

    @ShortTraceback()
    def choose_mesh(self, *args: Any, **kwargs: Any) -> Mesh:
        """The mesh that steps run on: with ``mesh="auto"`` the fastest for such batches, as the first step chooses it.

        Ranks that differ along ``model`` alone are to be given the same batches. Nothing is built yet. Collective.

        Raises:
            MemoryBudgetError: no mesh has a plan that fits the budget.
        """
        self._life.check_open("choose a mesh")
        with self._life.turn("choose a mesh", self._steps.device):
            return self._rungs.choose_mesh(self._steps.batch_of(args, kwargs))

    @ShortTraceback()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for a batch in evaluation mode, computed where its parameters are. Collective.

        It is what the forward returns, or ``loss_fn``, or ``forward=``, detached, of this rank's batch: a loss, or
        whatever else; None stands in the place of what is neither a tensor nor a plain value, such as a cache. Nothing
        is trained: after it parameters, optimizer states and torch's generators are as they were, and so are buffers,
        unless the forward changes them in evaluation mode too. Each batch shape is captured and planned once, apart
        from those of training, within the same memory budget: at stage 3 a bucket is gathered for its layer and
        released. Delayed updates are finished first, as by ``flush``. ``step.evaluation`` has the plan.

        Raises:
            UsageError: no step has been prepared yet, or the batch is none for the model.
            MemoryBudgetError: no plan for it fits the budget; says the least that one needs.
            CaptureError: the forward cannot be captured.
        """
        self._life.check_open("call step.evaluate(batch)", reads=True)
        if self.options.delayed_update is not None:
            self.flush()
        with self._life.turn("evaluate a batch", self._steps.device):
            return self._evaluations(args, kwargs)

    # ------------------------------------------------------------------------------------------------ ending

    def abandon(self) -> None:
        """Let go of a model that has not been taken over yet; on this rank alone. Does nothing afterwards.

        Ranks that wait for this one, to build the step with it, fail.
        """
        if self._steps.taken is None and not self._life.closed:
            self._life.closed = True
            if self._steps.tiers is not None:
                self._steps.tiers.close()
            release(self.model, self._owner)
            self._control.leave()

    def close(self) -> None:
        """Give the model its whole parameters and the optimizer its states back, and let go of both. Collective.

        Process groups that the step has made are destroyed; the user's is as it was before. After a step that failed on
        some rank, or a drive that did, it is not collective: what this rank can do alone is done, and a warning says
        what is not whole.

        Raises:
            RankMismatchError: a rank does not come, and the step is closed without it; or another world has taken the
                place of the step's, and it stays open.
            CheckpointError: a checkpoint that was saved asynchronously could not be written; the step is closed.
        """
        life = self._life
        if life.closed:
            return
        if life.showing:
            raise UsageError("expected close() outside full_parameters(), found it inside: leave the block first")
        life.check_trained("close the step")
        with life.claim("close the step"):
            self._close()

    def _close(self) -> None:
        life, steps = self._life, self._steps
        taken = steps.taken
        unsaved = self._end_saving()
        absence = end(taken, life, self._losses) if taken is not None else None
        if steps.tiers is not None:
            steps.tiers.close()
        life.closed = True
        steps.release()
        self._evaluations.shapes.forget()
        self._graphs.clear()
        release(self.model, self._owner)
        if taken is not None:
            absence = end_connections(taken, life) or absence
        self._control.close()
        for failure in (absence, unsaved):
            if failure is not None:
                raise failure

    def load_source(self, path: str | Path) -> None:
        """Run an edited copy of ``source`` in the place of the step that ran last.

        It runs until a batch of another shape or other optimizer options ask for another step. Ranks call it together.

        Raises:
            PlanError: the file cannot be loaded; the step runs as before.
            CompilerError: an edited region cannot be compiled; the step runs as before.
        """
        compiled = self.compiled
        self._life.check_open("load an edited step")
        self._steps.load_source(compiled, path)
        self._graphs.forget(compiled)
