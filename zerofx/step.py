"""The compiled step: what ``zerofx.compile`` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.batch import Batch
from zerofx.buckets import BucketLayout
from zerofx.building import Prepared, build_within_budget, describe_request, machine_at_hand, prepare
from zerofx.checks import check_batch, names
from zerofx.compiler import CompiledStep, load_step, read_edited
from zerofx.errors import RankMismatchError, UsageError, ZeroFXError, warn
from zerofx.given_plan import take_plan
from zerofx.guards import LossWatch, ModeWatch, ParameterWatch, claim, guard_model, release
from zerofx.latest import LatestStep
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.pipeline import check_disabled
from zerofx.report.summary import summary
from zerofx.runtime.arguments import batch_tensors, state_tensors
from zerofx.runtime.collectives import make_transport
from zerofx.runtime.control import WORK_SECONDS, Control
from zerofx.runtime.executor import Runtime
from zerofx.runtime.measure import Measurement, Meter, persistent_bytes
from zerofx.runtime.optimizer import Advance, OptimizerBinding, OptimizerState
from zerofx.runtime.state import TrainingState, process_group
from zerofx.runtime.tiers import Tiers
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.plan import StateDecision
from zerofx.settings import read_settings


class Step(LatestStep):
    """A training step: ``loss = step(*batch, **kwargs)`` runs forward, backward, reduction and update.

    It returns this rank's loss, detached, shape ``[]``: the update has been done, and ``loss.backward()`` is neither
    needed nor possible. The first call with a batch of some shape captures and plans a step for it; further calls with
    that shape run it. Ranks call it together.

    An error before the step runs leaves model and optimizer as they were. An error while it runs (an index out of
    range, no memory) leaves them as they were too if no bucket had been updated yet, which a note on the error says; on
    more than one rank the step cannot be used after that.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: CompileOptions) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = options
        self.settings = read_settings()
        check_disabled(self.settings)
        self._shapes: dict[str, dict[str, str]] = {}  # every batch captured so far: its signature, and what is in it
        self._steps: dict[tuple[str, str], CompiledStep] = {}  # by the batch's signature and the update's variant
        self._layout: BucketLayout | None = None
        self._state: TrainingState | None = None
        self._binding: OptimizerBinding | None = None
        self._optimizer_state: OptimizerState | None = None
        self._runtime: Runtime | None = None
        self._tiers: Tiers | None = None
        self._guards: list[Any] = []
        self._watch: ParameterWatch | None = None
        self._modes = ModeWatch(model)
        self._losses = LossWatch()
        self._loaded: Path | None = None
        self._failure = ""
        self._device = torch.device("cpu")
        self._machine: Machine | None = options.machine
        self._showing = False
        self._closed = False
        self.num_steps = 0
        self.measured_peak_bytes: int | None = None
        self._meter: Meter | None = None
        self._measured: tuple[CompiledStep, Measurement] | None = None
        self._group = process_group()
        self._owner = claim(model, self)
        try:
            self._control = Control(self._group, self.settings.timeout_seconds)
            self._control.agree(
                "call zerofx.compile",
                describe_request(model, optimizer, options, self.settings),
                "model, optimizer and options",
                "Compile the same on every rank.",
            )
            if options.plan is not None:
                self._machine = options.machine or machine_at_hand(next(iter(model.parameters())).device)
                self.options = take_plan(options, self._machine, self._control)
        except BaseException:
            release(model, self._owner)
            raise

    # ------------------------------------------------------------------------------------------------ running

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_open("call step(batch)")
        batch = self._take_apart(args, kwargs)
        compiled, advance, agreed = self._step_for(batch, "call step(batch)")
        assert self._state is not None and self._runtime is not None
        self._state.place(compiled.plan.states)
        versions = self._versions()
        advance.swap(self._state)
        try:
            self._runtime.begin(advance.values, agreed)
            with torch.no_grad():
                state = state_tensors(compiled.graph, self.model, self._state)
                given = (self._runtime, state, batch_tensors(compiled.graph, batch, self.options.compute_dtype))
                if self._meter is None:
                    loss = compiled.function(*given)
                else:
                    loss = self._meter(compiled.function, compiled.emitted.functions, *given)
            self._runtime.end()
        except BaseException as error:
            self._undo(advance, versions, error)
            raise
        self._after_step(loss)
        return loss

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and compile the step for a batch of this shape without running it."""
        self._check_open("prepare a step")
        _, _, agreed = self._step_for(self._take_apart(args, kwargs), "prepare a step")
        agreed()

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        """Measure what the plan predicts. This trains: it is ``num_steps`` steps on this batch. Collective.

        On CPU the last step is recorded by torch's profiler for its memory, and left out of the times if there are
        others. ``print(step)`` shows the outcome beside the predictions.

        Raises:
            UsageError: ``num_steps`` is less than one.
        """
        if num_steps < 1:
            raise UsageError(f"expected to measure at least one step, found num_steps={num_steps}")
        self.prepare(*args, **kwargs)
        meter = self._meter = Meter(self._device, num_steps)
        try:
            for _ in range(num_steps):
                self(*args, **kwargs)
        finally:
            self._meter = None
        assert self._layout is not None
        found = meter.result(self.compiled.graph, self._layout, self.plan.stage)
        self._measured, self.measured_peak_bytes = (self.compiled, found), found.peak_bytes["device"]
        return found

    def _take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        try:
            batch = Batch.of(args, kwargs)
            check_batch(self.model, batch)
            if self._watch is not None:
                self._watch.check()
        except ZeroFXError as error:
            # The other ranks are about to compare their batches with this one's: they hear of it there.
            self._control.start(f"raise {type(error).__name__}: {error}")
            raise
        return batch

    def _versions(self) -> dict[int, int]:
        """How often each bucket's stored values have been changed: tells which were updated in a step that failed."""
        assert self._layout is not None and self._state is not None
        return {b.index: self._state.buckets[b.index].updated._version for b in self._layout.buckets if b.trainable}

    def _undo(self, advance: Advance, versions: Mapping[int, int], error: BaseException) -> None:
        """Behind a step that failed: count no step for the buckets that had not been updated, and say which had."""
        assert self._layout is not None and self._state is not None and self._runtime is not None
        self._runtime.tiers.settle()
        now = self._versions()
        advance.swap(self._state, [index for index in versions if now[index] == versions[index]])
        if isinstance(error, RankMismatchError) and not self._runtime.has_communicated:
            return  # all ranks know, and have left the step at the same place
        updated = [self._layout.buckets[index].name for index in versions if now[index] != versions[index]]
        if updated:
            error.add_note(
                f"zerofx: when step {self.num_steps + 1} failed, {len(updated)} of {len(versions)} buckets had been "
                f"updated already ({names(updated)}): restore a checkpoint before training on"
            )
        else:
            error.add_note(f"zerofx: when step {self.num_steps + 1} failed, nothing had been updated yet")
        if self._control.num_ranks > 1:
            self._failure = (
                f"step {self.num_steps + 1} failed on rank {self._control.rank} ({type(error).__name__}: {error})"
            )
            error.add_note(
                f"zerofx: rank {self._control.rank} left the step that {self._control.num_ranks} ranks run together: "
                f"the others wait for it, or have failed before; restart all ranks from a checkpoint"
            )

    def _after_step(self, loss: torch.Tensor) -> None:
        self.num_steps += 1
        # torch's schedulers warn when they are stepped before the optimizer; the update has been done here.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._losses.add(self.num_steps, loss)
        self._report_losses()

    def _report_losses(self, *, wait: bool = False) -> None:
        for number, loss in self._losses.report(wait=wait):
            warn(
                f"the loss is {loss} on rank {self._control.rank} in step {number}; the update with its gradients has "
                f"been done. Lower the learning rate, or look for an overflow"
            )

    # ------------------------------------------------------------------------------------------------ building

    def _check_open(self, purpose: str) -> None:
        if self._closed:
            raise UsageError(f"expected to {purpose} before close(), found the step closed: compile the model again")
        if self._showing:
            raise UsageError(f"expected to {purpose} outside full_parameters(), found it inside: leave the block first")
        self._check_world()

    def _check_world(self) -> None:
        group = process_group()
        now = torch.distributed.get_world_size(group) if group is not None else 1
        if now != self._control.num_ranks or (now > 1 and group is not self._group):
            found = f"{now}" if now != self._control.num_ranks else "another process group"
            raise RankMismatchError(
                f"expected the world of {self._control.num_ranks} rank(s) that the model was compiled in, found "
                f"{found}: save full_state_dict() and optimizer.state_dict() before the world changes, and build and "
                f"compile the model again after"
            )
        if self._failure:
            raise RankMismatchError(
                f"expected all ranks to be in the same place, found that {self._failure}: restart all ranks from a "
                f"checkpoint"
            )

    def _step_for(self, batch: Batch, purpose: str) -> tuple[CompiledStep, Advance, Callable[[], None]]:
        """The step for a batch, built if need be, with its scalars, and what waits until all ranks agree to run it."""
        described = batch.described() | {"mode": self._modes.mode()}
        signature = "\n".join(f"{name}: {text}" for name, text in described.items())
        advance = self._advance()
        variant = self._binding.variant if self._binding is not None else "not traced yet"
        agreed = self._control.start(
            purpose,
            f"{signature}\noptimizer update: {variant}",
            "batch shapes, modes and optimizer options",
            "Give every rank batches of the same shapes, for example by padding, and the same optimizer options.",
        )
        compiled = self._steps.get((signature, variant))
        if compiled is None:
            agreed()
            agreed = _nothing
            compiled = self._build(batch, signature, described)
            advance = advance or self._advance()
            assert self._binding is not None
            self._shapes[signature] = described
            self._steps[signature, self._binding.variant] = compiled
        assert advance is not None
        self._latest = compiled
        return compiled, advance, agreed

    def _advance(self) -> Advance | None:
        """The coming step's scalars; the update is traced anew where the optimizer's options or states ask for it."""
        if self._state is None or self._binding is None:
            return None
        advance = self._binding.advance(self._state)
        if advance is None:
            self._allocate_states(self._binding.programs(self._state))
            advance = self._binding.advance(self._state)
            assert advance is not None, "the update has been traced for the options that hold now"
        return advance

    def _allocate_states(self, programs: Mapping[int, UpdateProgram]) -> None:
        assert self._state is not None
        for index, program in programs.items():
            self._state.new_states(self._state.layout.buckets[index], program, self._device)

    def _build(self, batch: Batch, signature: str, described: Mapping[str, str]) -> CompiledStep:
        if signature not in self._shapes:
            self._announce_shape(described)
        if self._loaded is not None:
            warn(
                f"the edited step {self._loaded} runs for the batch shape and optimizer options it was loaded for; "
                f"this call has others and runs a newly generated step"
            )
        with self._unguarded():
            prepared = self._control.attempt("capture a step", lambda: self._prepare(batch), WORK_SECONDS)
            prepared.agree(self._control)
            machine = self._machine or machine_at_hand(prepared.captured.device)
            compiled = build_within_budget(prepared, machine, self.options, self.settings, self._control)
        self._prepare_tiers(compiled, prepared.captured.device)
        if self._state is None:
            self._take_over(prepared.layout, prepared.binding, prepared.captured.device, compiled.plan.states)
            self._allocate_states(prepared.programs)
        self._machine = machine
        return compiled

    def _prepare_tiers(self, compiled: CompiledStep, device: torch.device) -> None:
        tiers = self._tiers = self._tiers or Tiers(device, self.settings.nvme_dir)
        peaks = compiled.plan.peak_bytes
        if "nvme" in peaks:
            purpose = "prepare the nvme tier"
            num_local_ranks = len(self._control.ranks_of_host(purpose))
            self._control.attempt(purpose, lambda: tiers.prepare(peaks, num_local_ranks))

    def _prepare(self, batch: Batch) -> Prepared:
        return prepare(
            self.model, self.optimizer, batch, self.options, self.settings, self._control.num_ranks,
            self._layout, self._binding, self._state, talk=self._control.rank == 0,
        )  # fmt: skip

    def _announce_shape(self, described: Mapping[str, str]) -> None:
        if len(self._shapes) >= self.options.max_shapes:
            known = "\n".join(f"  {', '.join(f'{n}: {t}' for n, t in one.items())}" for one in self._shapes.values())
            raise UsageError(
                f"expected at most {self.options.max_shapes} batch shapes, found another: "
                f"{self._difference(described)}. Pad batches to few shapes, pass numbers that change as tensors, or "
                f"raise max_shapes. Captured so far:\n{known}"
            )
        if self._shapes:
            warn(f"a batch of another shape is captured and planned anew: {self._difference(described)}")

    def _take_over(
        self,
        layout: BucketLayout,
        binding: OptimizerBinding,
        device: torch.device,
        decisions: Sequence[StateDecision],
    ) -> None:
        transport = make_transport(self._group, device)
        assert self._tiers is not None
        state = TrainingState(self.model, layout, self.options.stage, transport, self._tiers)
        state.take_over(decisions)
        self._layout, self._binding, self._state, self._device = layout, binding, state, device
        self._runtime = Runtime(layout, transport, device, self._tiers)
        self._optimizer_state = OptimizerState(self.optimizer, state, self._control)
        self._owner.keep()
        self._watch = ParameterWatch(self.model)
        if not state.resident:
            self._guards = guard_model(self.model, lambda: self._showing)

    def _difference(self, described: Mapping[str, str]) -> str:
        """What the nearest known batch has otherwise."""
        known = max(self._shapes.values(), key=lambda one: len(one.items() & described.items()))
        changed = [
            f"{name}: {described.get(name, 'none')} (was {known.get(name, 'none')})"
            for name in dict.fromkeys([*described, *known])
            if described.get(name) != known.get(name)
        ]
        return ", ".join(changed)

    # ------------------------------------------------------------------------------------------------ the model

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        before, self._showing = self._showing, True
        try:
            yield
        finally:
            self._showing = before

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

    def tiers(self) -> dict[str, int]:
        """Bytes that this rank holds between steps, by tier: ``device``, and ``host`` and ``nvme`` where used now.

        Raises:
            UsageError: no step has been captured yet, or the step is closed.
        """
        compiled = self.compiled
        if self._state is None or self._tiers is None:
            raise UsageError("expected to ask what is where before close(), found the step closed")
        state = state_tensors(compiled.graph, self.model, self._state)
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
        """Let go of a model that has not been taken over yet; on this rank alone. Does nothing afterwards."""
        if self._state is None:
            self._closed = True
            if self._tiers is not None:
                self._tiers.close()
            release(self.model, self._owner)

    def close(self) -> None:
        """Give the model its whole parameters and the optimizer its states back, and let go of both. Collective."""
        if self._closed:
            return
        if self._showing:
            raise UsageError("expected close() outside full_parameters(), found it inside: leave the block first")
        if self._state is not None:
            self._check_world()
            self._control.meet("close the step")
            self._report_losses(wait=True)
            for guard in self._guards:
                guard.remove()
            self._state.show_parameters()
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
            assert self._optimizer_state is not None
            self._optimizer_state.give_back()
        if self._tiers is not None:
            self._tiers.close()
        self._closed = True
        self._state, self._binding, self._runtime, self._watch, self._optimizer_state = None, None, None, None, None
        self._steps.clear()
        release(self.model, self._owner)

    # ------------------------------------------------------------------------------------------------ seeing

    def __str__(self) -> str:
        measured = self._measured[1] if self._measured is not None and self._measured[0] is self._latest else None
        return summary(self, self._latest, measured)

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
        function, _ = load_step(text, str(path), compiled.instructions, functions, self._control, self.options.backend)
        replaced = replace(
            compiled, function=function, source_path=Path(path), emitted=replace(compiled.emitted, source=text)
        )
        self._steps = {key: replaced if value is compiled else value for key, value in self._steps.items()}
        self._latest = replaced
        self._loaded = Path(path)


def _nothing() -> None:
    """What is left to wait for where all ranks have met already."""
