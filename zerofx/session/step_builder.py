"""What a step builds before it can run: the shapes seen so far, and the state that the first of them takes over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.capture.absent_gradients import AbsentGradients
from zerofx.capture.checks import device_of
from zerofx.capture.constant_arguments import ConstantArguments
from zerofx.capture.kept_tensors import tell_kept_tensors
from zerofx.capture.trace import dtype_settings, tracing_device
from zerofx.deferred import becoming_real
from zerofx.driver.building import describe_request, machine_at_hand
from zerofx.driver.garbage import collecting_recent_garbage_only
from zerofx.driver.given_plan import take_plan
from zerofx.driver.warm_start import Built, Earlier, Request, build_step
from zerofx.errors import RankMismatchError, TierError, UsageError, warn
from zerofx.ir.batch import Batch
from zerofx.ir.buckets import BucketLayout
from zerofx.lowering.load import CompiledStep
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.pipeline import check_disabled
from zerofx.runtime.comm.collectives import make_transport
from zerofx.runtime.comm.control import Control
from zerofx.runtime.cuda_graphs.capturing import CudaCapturer
from zerofx.runtime.cuda_graphs.graphed import GraphedSteps
from zerofx.runtime.cuda_graphs.obstacles import machine_obstacle, step_obstacle
from zerofx.runtime.executor import Runtime
from zerofx.runtime.measure.measure import Measurement, Meter
from zerofx.runtime.state.optimizer import Advance, OptimizerBinding, hyperparameters
from zerofx.runtime.state.optimizer_state import OptimizerState
from zerofx.runtime.state.state import TrainingState, process_group
from zerofx.runtime.state.values import Values
from zerofx.runtime.tiers.allocator import keep_freed_memory
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import budget_bytes, host_budget_bytes
from zerofx.session.guards import LossWatch, ModeWatch, NumberWatch, ParameterWatch, claim, guard_model, release
from zerofx.session.latest import LatestStep
from zerofx.settings import read_settings


class StepBuilder(LatestStep):
    """Finds or builds the step of a batch, for ``Step`` to inherit. The first one takes the model over."""

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
        watched = options.objective.watched(model)
        self._modes = ModeWatch(watched)
        self._numbers = NumberWatch(watched)
        self._gradients = AbsentGradients(model)
        self._constant = ConstantArguments(options.constant, model, options.objective.forward)
        self._losses = LossWatch()
        self._loaded: Path | None = None
        self._failure = ""
        self._device = device_of(model)
        self._machine: Machine | None = options.machine
        self._showing = False
        self._closed = False
        self.num_steps = 0
        self.num_skipped = 0  # steps that on_nonfinite="skip" has left out, which ``num_steps`` does not count
        self._meter: Meter | None = None
        owner = weakref.proxy(self)  # a step that is dropped goes at once
        self._graphs = GraphedSteps(
            lambda: CudaCapturer(owner._device),
            lambda compiled: owner._graph_obstacle(compiled),
            required=options.cuda_graphs is True,
        )
        self._grad_norm: torch.Tensor | None = None
        self._measured: tuple[CompiledStep, Measurement] | None = None
        self._group = process_group()
        self._owner = claim(model, self)
        with contextlib.ExitStack() as undo:
            undo.callback(release, model, self._owner)
            self._control = Control(self._group, self.settings.timeout_seconds)
            undo.callback(self._control.leave)
            self._control.agree(
                "call zerofx.compile",
                describe_request(model, optimizer, options, self.settings),
                "model, optimizer and options",
                "Compile the same on every rank.",
            )
            self._values = Values(model, options.weights, self._control)
            if options.plan is not None:
                self._machine = machine_at_hand(device_of(model), options, self._control)
                self.options = take_plan(options, self._machine, self._control)
            undo.pop_all()

    @property
    def notice(self) -> str:
        """What makes messages between ranks slower than they could be, as far as is known; empty for nothing."""
        return self._runtime.notice if self._runtime is not None else ""

    def _check_open(self, purpose: str) -> None:
        if self._closed:
            raise UsageError(f"expected to {purpose} before close(), found the step closed: compile the model again")
        if self._showing:
            raise UsageError(f"expected to {purpose} outside full_parameters(), found it inside: leave the block first")
        self._check_world()
        if self._failure:
            raise TierError(
                f"expected to {purpose} with all states where they were put, found that {self._failure}: call "
                f"step.close(), build and compile the model again, and load a checkpoint"
            )

    @property
    def _failed(self) -> str:
        """What ended the step on this rank or another: ``step 3 failed on rank 1 ...``; empty if nothing."""
        return self._failure or self._control.lost

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
        if self._control.lost:
            raise RankMismatchError(
                f"expected all ranks to be in the same place, found that {self._control.lost}: restart all "
                f"ranks from a checkpoint"
            )

    def _step_for(self, batch: Batch, purpose: str) -> tuple[CompiledStep, Advance, Callable[[], None]]:
        """The step for a batch, built if need be, with its scalars, and what waits until all ranks agree to run it."""
        described = batch.described() | {"training mode": self._modes.mode()} | dtype_settings()
        signature = "\n".join(f"{name}: {text}" for name, text in described.items())
        advance = self._advance()
        variant = self._binding.variant if self._binding is not None else "not traced yet"
        agreed = self._control.start(
            purpose,
            f"{signature}\noptimizer update: {variant}\n{hyperparameters(self.optimizer)}",
            "batch shapes, modes, autocast and optimizer options",
            "Give every rank batches of the same shapes, for example by padding, and the same optimizer options: a "
            "scheduler that follows a loss has to be given the mean of all ranks' losses.",
        )
        compiled = self._steps.get((signature, variant))
        if compiled is None:
            agreed()
            agreed = _nothing
            with self._numbers.capturing():
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
        if self._optimizer_state is not None:
            self._optimizer_state.take_loaded()
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
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "expected the first step of a batch shape outside of torch.inference_mode(), found it inside, where "
                "nothing that is made can be trained: leave it first"
            )
        if signature not in self._shapes:
            self._announce_shape(described)
        if self._loaded is not None:
            warn(
                f"the edited step {self._loaded} runs for the batch shape and optimizer options it was loaded for; "
                f"this call has others and runs a newly generated step"
            )
        beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.options.compiles_regions:
            # Inductor takes seconds to import: only who needs it pays.
            from zerofx.codegen.inductor.cpp import preparation

            beside = preparation(next(self.model.parameters()).device.type).begun()
        self._gradients.remove()  # a capture looks at all that a parameter has
        with beside, self._unguarded(), collecting_recent_garbage_only():
            # A capture has the same device.
            device = tracing_device(self.model, batch)
            machine = self._machine or machine_at_hand(device, self.options, self._control)
            built = self._build_step(batch, machine)
        if not self._shapes:
            tell_kept_tensors(self.model, self.options.objective.forward or self.options.objective.loss_fn)
        self._machine, compiled = machine, built.compiled
        if self.options.on_nonfinite == "skip" and compiled.returned.extras is not None:
            raise UsageError(
                "expected forward to return its loss alone with on_nonfinite='skip', under which a step that is left "
                "out has nothing else to return, found more: give on_nonfinite='raise'"
            )
        if self.options.cuda_graphs is True and (obstacle := self._graph_obstacle(compiled)):
            raise UsageError(
                f"expected a step that CUDA graphs can be made of, since cuda_graphs=True, found that {obstacle}: give "
                f"cuda_graphs='auto' to have them where they are possible"
            )
        self._prepare_tiers(compiled, compiled.device, machine)
        if self._state is None:
            self._take_over(built.layout, built.binding, compiled.device, compiled.plan)
            self._allocate_states(built.programs)
        return compiled

    def _graph_obstacle(self, compiled: CompiledStep) -> str:
        """Why the kernels of ``compiled`` are not launched as CUDA graphs; empty where they may be."""
        if self.options.cuda_graphs is False:
            return "cuda_graphs=False"
        if self._loaded is not None and compiled.source_path == self._loaded:
            return f"every line of {self._loaded} is to run in every step"
        assert self._machine is not None, "a compiled step has been planned for one"
        budget = budget_bytes(self.options.memory_budget, self._machine)
        device = device_of(self.model)
        return machine_obstacle(device) or step_obstacle(compiled.lowered, device, budget)

    def _prepare_tiers(self, compiled: CompiledStep, device: torch.device, machine: Machine) -> None:
        limit = host_budget_bytes(self.options.host_budget, machine)
        tiers = self._tiers = self._tiers or Tiers(device, self.settings.nvme_dirs, limit)
        peaks = compiled.plan.peak_bytes
        if "nvme" in peaks:
            purpose = "prepare the nvme tier"
            num_local_ranks = len(self._control.ranks_of_host(purpose))
            self._control.attempt(purpose, lambda: tiers.prepare(peaks, num_local_ranks))

    def _build_step(self, batch: Batch, machine: Machine) -> Built:
        request = Request(
            self.model, self.optimizer, batch, self.options, self.settings, self._control.num_ranks, machine
        )
        earlier = None
        if self._state is not None:
            assert self._layout is not None and self._binding is not None
            earlier = Earlier(self._layout, self._binding, self._state)
        return build_step(request, earlier, self._control)

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
        plan: Plan,
    ) -> None:
        assert self._tiers is not None
        with self._control.together("take the model over"):
            transport = make_transport(self._group, device, self._control.patience_seconds, self._tiers.log)
            if transport is not None:
                self._control.on_failure(transport.abort)
            state = TrainingState(self.model, layout, self.options.stage, transport, self._tiers)
            weights = self._values.source(state.parameters, device, transport)
            with becoming_real(self.model):
                state.take_over(weights, plan)
        self._layout, self._binding, self._state, self._device = layout, binding, state, device
        self._runtime = Runtime(layout, transport, device, self._tiers)
        if self._runtime.notice:
            warn(self._runtime.notice)
        self._optimizer_state = OptimizerState(binding, state, self._control)
        self._owner.keep()
        self._gradients.put()
        self._watch_parameters()
        # Whose plan moves memory off the device is after the resident set, which only shrinks with what is given back.
        if self.settings.keep_freed and device.type == "cpu" and not plan.slower_peak_bytes:
            keep_freed_memory()

    def _watch_parameters(self) -> None:
        """Watch the parameters that the model has now, and guard it where they have no values."""
        state = self._state
        assert state is not None
        self._watch = ParameterWatch(self.model)
        if not state.resident and not self._guards:
            self._guards = guard_model(self.model, lambda: self._showing or state.resident)

    def _difference(self, described: Mapping[str, str]) -> str:
        """What the nearest known batch has otherwise."""
        known = max(self._shapes.values(), key=lambda one: len(one.items() & described.items()))
        changed = [
            f"{name}: {described.get(name, 'none')} (was {known.get(name, 'none')})"
            for name in dict.fromkeys([*described, *known])
            if described.get(name) != known.get(name)
        ]
        return ", ".join(changed)

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        before, self._showing = self._showing, True
        try:
            yield
        finally:
            self._showing = before


def _nothing() -> None:
    """What is left to wait for where all ranks have met already."""
