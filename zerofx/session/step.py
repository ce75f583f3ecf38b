"""The compiled step: what ``zerofx.compile`` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.capture.checks import check_batch, names
from zerofx.codegen.kernels.current_device import on_device
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.deferred import is_deferred
from zerofx.errors import NonFiniteLossError, RankMismatchError, UsageError, ZeroFXError, warn, working
from zerofx.ir.batch import Batch
from zerofx.lowering.load import CompiledStep, load_step, read_edited
from zerofx.runtime.cuda_graphs.graphed import Launches
from zerofx.runtime.measure.measure import Measurement, Meter, persistent_bytes
from zerofx.runtime.state.arguments import batch_tensors, state_tensors
from zerofx.runtime.tiers.allocator import return_freed_memory
from zerofx.scheduler.cost.cpu.peaks import refuse_profilers
from zerofx.session.ending import give_back_alone, let_go
from zerofx.session.guards import ParameterWatch, release
from zerofx.session.stopped import StoppedStep
from zerofx.session.summary import summary
from zerofx.torch_private.profiler import is_profiling


class Step(StoppedStep):
    """A training step: ``loss = step(*batch, **kwargs)`` runs forward, backward, reduction and update.

    It returns this rank's loss, detached, shape ``[]``: the update has been done, and ``loss.backward()`` is neither
    needed nor possible. The first call with a batch of some shape captures and plans a step for it; further calls with
    that shape run it. Ranks call it together.

    Where ``forward`` returns a pair, so does the step: ``loss, extras = step(*batch)``. The tensors of ``extras`` are
    this rank's, detached, on their device; with ``accumulate`` other than 1, ``extras`` is a list of what each
    micro-batch gives, and None for a step that was left out. What else a model returns besides its loss is computed
    only where the loss needs it, and not
    kept: ``print(step)`` lists it, and ``forward`` can hand it out.

    An error before the step runs leaves model and optimizer as they were. An error while it runs (an index out of
    range, no memory) leaves them as they were too if no bucket had been updated yet, which a note on the error says; on
    more than one rank the step cannot be used after that.
    """

    # ------------------------------------------------------------------------------------------------ running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with on_device(self._device), working("run a step"):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._check_open("call step(batch)")
        batch = self._take_apart(args, kwargs)
        compiled, advance, agreed = self._step_for(batch, "call step(batch)")
        assert self._state is not None and self._runtime is not None
        if self._state.place(compiled.plan):
            self._state.hide_parameters()
            self._watch_parameters()
        versions = self._versions()
        advance.swap(self._state)
        try:
            self._runtime.begin(advance.values, agreed)
            with torch.no_grad():
                state = state_tensors(compiled.arguments, self.model, self._state, self.options.objective.outside)
                given = (self._runtime, state, batch_tensors(compiled.arguments, batch, self.options.compute_dtype))
                if self._meter is None:
                    outcome = self._graphs.run(compiled, *given)
                else:
                    outcome = self._meter(compiled.function, compiled.emitted.functions, *given)
            self._runtime.end()
        except NonFiniteLossError as error:
            left = self._leave_out(advance, versions, error)
            return left if compiled.returned.extras is None else (left, None)
        except BaseException as error:
            failure = self._undo(advance, versions, error)
            if failure is not error:
                raise failure from error
            raise
        loss, *others = outcome if isinstance(outcome, tuple) else (outcome,)
        self._grad_norm = others.pop() if self.options.max_grad_norm is not None else None
        self._gradients.put()
        self._after_step(loss)
        self._finish_updates(compiled)
        return loss if compiled.returned.extras is None else (loss, self._extras(compiled, others))

    def _extras(self, compiled: CompiledStep, tensors: Sequence[torch.Tensor]) -> Any:
        """What ``forward`` returned after its loss, around a step's tensors."""
        num, returned = compiled.plan.num_micro_batches, compiled.returned
        each = returned.num_tensors
        found = [returned.rebuilt(tensors[i * each : (i + 1) * each]) for i in range(num)]
        return found if num > 1 or self.options.accumulate != 1 else found[0]

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and compile the step for a batch of this shape without running it."""
        self._check_open("prepare a step")
        with on_device(self._device), working("prepare a step"):
            _, _, agreed = self._step_for(self._take_apart(args, kwargs), "prepare a step")
            agreed()

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        """Measure what the plan predicts. This trains: it is ``num_steps`` steps on this batch. Collective.

        Memory is that of the last step: give more than one where the step has not run yet, since libraries take memory
        in their first. On CPU torch's profiler records it, and it is left out of the times if there are others.
        ``print(step)`` shows the outcome beside the predictions.

        Raises:
            UsageError: ``num_steps`` is less than one, or, on CPU, a profiler runs on some rank; nothing has run then.
        """
        if num_steps < 1:
            raise UsageError(f"expected to measure at least one step, found num_steps={num_steps}")
        self._check_open("measure a step")
        if self._device.type == "cpu":
            refuse_profilers(self._control.gather(is_profiling(), "measure a step"))
        self.prepare(*args, **kwargs)
        meter = self._meter = Meter(self._device, num_steps)
        try:
            for _ in range(num_steps):
                with meter.whole_step():
                    self(*args, **kwargs)
        finally:
            self._meter = None
        assert self._layout is not None
        found = meter.result(self.compiled.graph, self._layout, self.plan.stage)
        self._measured = self.compiled, found
        return found

    def _take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        try:
            batch = self._constant.of(Batch.of(args, kwargs))
            check_batch(self.model, batch)
            self.options.objective.outside.check()
            if self._watch is not None:
                self._watch.check()
        except ZeroFXError as error:
            # The other ranks are about to compare their batches with this one's: they hear of it there.
            self._control.start(f"raise {type(error).__name__}: {error}")
            raise
        return batch

    def _after_step(self, loss: torch.Tensor) -> None:
        self.num_steps += 1
        # torch's schedulers warn when they are stepped before the optimizer; the update has been done here.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # private, and all they ask
        self._losses.add(self.num_steps, loss)
        self._report_losses()
        if changes := self._numbers.changes():
            warn(
                f"expected the Python values that modules had while a step was captured, found {names(changes)} in "
                f"step {self.num_steps}, computed with what they were: pass what changes as a tensor in the batch, "
                f"keep it in a buffer, or call step.close() and compile again"
            )

    def _finish_updates(self, compiled: CompiledStep) -> None:
        """After a step with delayed updates: leave them to the host, or finish them while that is warming up."""
        assert self._state is not None
        if any(decision.delayed for decision in compiled.plan.states):
            self._state.count_delayed()
            if self.num_steps <= (self.options.delayed_update or 0):
                self._state.flush()

    def flush(self) -> None:
        """Finish delayed updates, so that the parameters are those after all steps so far. Collective.

        Whatever shows parameters or states does so by itself: ``full_parameters``, ``full_state_dict``,
        ``optimizer.state_dict`` and ``close``. The step after a flush computes with parameters that are up to date, as
        the first one after the warm-up does. Without ``delayed_update`` there is nothing to finish.
        """
        self._check_open("flush the step")
        if self._state is not None:
            self._control.meet("flush the step")
            with self._control.together("flush the step"):
                self._state.flush()

    def _report_losses(self, *, wait: bool = False) -> None:
        for number, loss in self._losses.report(wait=wait):
            warn(
                f"the loss is {loss} on rank {self._control.rank} in step {number}; the update with its gradients has "
                f"been done. Lower the learning rate, or look for an overflow"
            )

    # ------------------------------------------------------------------------------------------------ the model

    @contextlib.contextmanager
    def full_parameters(self, *, write_back: bool = False) -> Iterator[nn.Module]:
        """The model with its whole, trained parameters, for evaluation, generation or saving. Every rank must enter.

        Args:
            write_back: take the values that the parameters have at the end of the block as those to train on from, for
                example after ``model.load_state_dict``. Without it, changes made in the block are dropped where
                parameters are sharded.

        Before the first step and after ``close`` this is the model as it is. Where the block raises, nothing is written
        back.
        """
        if self._state is None:
            if is_deferred(self.model):
                raise UsageError(
                    "expected full parameters to be asked for once there are any, found a deferred model before its "
                    "first step: call step.prepare(batch) first, which makes its values"
                )
            yield self.model
            return
        if self._showing:
            if write_back:
                raise UsageError(
                    "expected write_back=True at the outermost full_parameters() block, found it inside another: give "
                    "it there"
                )
            yield self.model
            return
        self._check_world()
        self._control.meet("enter full_parameters()")
        with self._control.together("show the whole parameters"):
            self._state.flush()
            if not self._state.resident:
                self._state.show_parameters()
        self._showing = True
        done = False
        try:
            yield self.model
            done = True
        finally:
            self._showing = False
            if write_back and done:
                self._state.write_back()
            self._state.hide_parameters()
            self._watch = ParameterWatch(self.model)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients in the last step, before they were clipped: what ``clip_grad_norm_`` returns.

        Shape ``[]``, on the step's device, the same on every rank, and a tensor of its own for each step; the host does
        not wait for it until it is read.

        Raises:
            UsageError: gradients are not clipped, or no step has run yet.
        """
        if self.options.max_grad_norm is None:
            raise UsageError(
                "expected max_grad_norm to be given to zerofx.compile, found None, with which no norm is taken: "
                "max_grad_norm=math.inf takes it and clips nothing"
            )
        if self._grad_norm is None:
            raise UsageError("expected a step to have run, found none yet: call step(batch) first")
        return self._grad_norm

    def tiers(self) -> dict[str, int]:
        """Bytes that this rank holds between steps, by tier: ``device``, and ``host`` and ``nvme`` where used now.

        Raises:
            UsageError: no step has been captured yet, or the step is closed.
        """
        compiled = self.compiled
        if self._state is None or self._tiers is None:
            raise UsageError("expected to ask what is where before close(), found the step closed")
        state = state_tensors(compiled.arguments, self.model, self._state, self.options.objective.outside)
        held = {tier: size for tier, size in self._tiers.held_bytes.items() if size}
        return {"device": persistent_bytes(state.values()), **held}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """``model.state_dict()`` with whole, trained parameters, as copies on the CPU, on every rank. Collective."""
        with self.full_parameters():
            return {
                name: tensor.detach().to("cpu", copy=True) if isinstance(tensor, torch.Tensor) else tensor
                for name, tensor in self.model.state_dict().items()
            }

    def abandon(self) -> None:
        """Let go of a model that has not been taken over yet; on this rank alone. Does nothing afterwards.

        Ranks that wait for this one, to build the step with it, fail.
        """
        if self._state is None and not self._closed:
            self._closed = True
            if self._tiers is not None:
                self._tiers.close()
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
        """
        if self._closed:
            return
        if self._showing:
            raise UsageError("expected close() outside full_parameters(), found it inside: leave the block first")
        absence: RankMismatchError | None = None
        if self._state is not None:
            if not self._failed:
                try:
                    self._give_back()
                except RankMismatchError as error:
                    if not self._failed:
                        raise
                    absence = error
            if self._failed:
                assert self._optimizer_state is not None
                give_back_alone(self.model, self._state, self._optimizer_state, self._guards, self._failed)
        if self._tiers is not None:
            self._tiers.close()
        self._closed = True
        self._gradients.remove()
        runtime = self._runtime
        self._state, self._binding, self._runtime, self._watch, self._optimizer_state = None, None, None, None, None
        self._steps.clear()
        self._graphs.clear()
        release(self.model, self._owner)
        return_freed_memory()
        if runtime is not None:
            if not self._failed:  # others may still gather from this rank
                try:
                    self._control.meet("end the connections of a closed step")
                except RankMismatchError as error:
                    absence = error
            runtime.close()
        self._control.close()
        if absence is not None:
            raise absence

    def _give_back(self) -> None:
        assert self._state is not None and self._optimizer_state is not None
        self._check_world()
        self._control.meet("close the step")
        self._report_losses(wait=True)
        with self._control.together("close the step"):
            self._state.flush()
            self._state.show_parameters()
            self._optimizer_state.give_back()
        let_go(self.model, self._guards)

    # ------------------------------------------------------------------------------------------------ seeing

    def __str__(self) -> str:
        measured = self._measured[1] if self._measured is not None and self._measured[0] is self._latest else None
        return summary(self, self._latest, measured)

    @property
    def launches(self) -> Launches:
        """How the kernels of the step that ran last are launched: as CUDA graphs, or one by one and why.

        Raises:
            UsageError: no step has been captured yet.
        """
        return self._graphs.launches(self.compiled)

    def __repr__(self) -> str:
        return f"<zerofx.Step of {type(self.model).__name__}, stage {self.options.stage}, {self.num_steps} steps done>"

    def load(self, path: str | Path) -> None:
        """Run an edited copy of ``source`` in the place of the step that ran last.

        It runs until a batch of another shape or other optimizer options ask for another step. Ranks call it together.

        Raises:
            PlanError: the file cannot be loaded; the step runs as before.
            CompilerError: an edited region cannot be compiled; the step runs as before.
        """
        compiled = self.compiled
        functions = compiled.emitted.functions

        self._check_open("load an edited step")
        text = self._control.attempt("load an edited step", lambda: read_edited(path, functions))
        self._control.agree("load an edited step", text, "edited step", "Give every rank the same file.")
        backend = self.options.backend
        kernels = kernels_in_use(self.settings.kernels, self._device) if backend == "inductor" else frozenset[str]()
        with on_device(self._device):
            loaded = load_step(
                text, str(path), compiled.regions, functions, self._control, backend, kernels, edited=True
            )
        replaced = replace(
            compiled, function=loaded.function, updates=loaded.updates, source_path=Path(path),
            emitted=replace(compiled.emitted, source=text),
        )  # fmt: skip
        self._graphs.forget(compiled)
        self._steps = {key: replaced if value is compiled else value for key, value in self._steps.items()}
        self._latest = replaced
        self._loaded = Path(path)
