"""The compiled step: what ``zerofx.compile`` returns."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.buckets import BucketLayout, layout_of
from zerofx.capture import Batch, capture
from zerofx.compiler import CompiledStep, budget_bytes, build, load_step, lower, make_plan
from zerofx.errors import MemoryBudgetError, PlanError, RankMismatchError, ShardedParametersError, UsageError, ZeroFXError, ZeroFXWarning
from zerofx.graph import Role, StepGraph, placeholder
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.passes.simplify import simplify
from zerofx.pipeline import Stage
from zerofx.runtime.collectives import make_transport
from zerofx.runtime.control import Control, check_equal
from zerofx.runtime.executor import Runtime
from zerofx.runtime.optimizer import OptimizerBinding, OptimizerState, group_of_parameters
from zerofx.runtime.state import TrainingState, process_group
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.machines import machine_of_device
from zerofx.scheduler.plan import Plan
from zerofx.settings import read_settings

_MARK = "_zerofx_step"
_FIT_ROUNDS = 5  # plans to try until compiled regions are within the budget too


class Step:
    """A training step: ``loss = step(*batch, **kwargs)`` runs forward, backward, reduction and update.

    It returns this rank's loss, detached, shape ``[]``. The first call with a batch of some shape captures and plans a
    step for it; further calls with that shape run it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: CompileOptions) -> None:
        if getattr(model, _MARK, None) is not None:
            raise UsageError(
                "expected a model that no step trains yet, found one that was compiled before: use that step, or call "
                "its close() first, which gives the model its parameters back"
            )
        self.model = model
        self.optimizer = optimizer
        self.options = options
        self.settings = read_settings()
        self._group = process_group()
        self._control = Control(self._group, self.settings.timeout_seconds)
        self._steps: dict[str, CompiledStep] = {}
        self._latest: CompiledStep | None = None
        self._layout: BucketLayout | None = None
        self._state: TrainingState | None = None
        self._binding: OptimizerBinding | None = None
        self._optimizer_state: OptimizerState | None = None
        self._runtime: Runtime | None = None
        self._guards: list[Any] = []
        self._device = torch.device("cpu")
        self._machine: Machine | None = options.machine
        self._showing = False
        self._closed = False
        self.num_steps = 0
        self.measured_peak_bytes: int | None = None

    # ------------------------------------------------------------------------------------------------ running

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = Batch.of(args, kwargs)
        compiled = self._step_for(batch)
        assert self._binding is not None and self._state is not None and self._runtime is not None
        scalars = self._binding.scalars(self._state)
        if scalars is None:
            # An option changed, or the optimizer took another branch: its update is traced and planned anew.
            self._steps.clear()
            compiled = self._step_for(batch)
            scalars = self._binding.scalars(self._state)
            assert scalars is not None
        self._runtime.set_scalars(scalars)
        with torch.no_grad():
            loss = compiled.function(self._runtime, self._state_tensors(compiled), self._batch_tensors(compiled, batch))
        self._after_step(loss)
        return loss

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and compile the step for a batch of this shape without running it."""
        self._step_for(Batch.of(args, kwargs))

    def _after_step(self, loss: torch.Tensor) -> None:
        self.num_steps += 1
        # torch's schedulers warn when they are stepped before the optimizer; the update has been done here.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._device.type == "cpu" and not math.isfinite(float(loss)):
            warnings.warn(
                f"the loss is {float(loss)} on rank {self._control.rank} in step {self.num_steps}; the update with its "
                f"gradients has been done. Lower the learning rate, or look for an overflow",
                ZeroFXWarning,
                stacklevel=3,
            )

    def _state_tensors(self, compiled: CompiledStep) -> dict[str, Any]:
        assert self._state is not None
        buffers = dict(self.model.named_buffers())
        tensors: dict[str, Any] = {}
        for node in compiled.graph.placeholders():
            what = placeholder(node)
            if what.role is Role.BUFFER:
                tensors[node.name] = buffers[what.name]
            elif what.role is Role.CONSTANT:
                tensors[node.name] = compiled.graph.constants[what.name]
            elif what.bucket is not None:
                bucket = self._state.buckets[what.bucket]
                tensors[node.name] = {
                    Role.FULL: lambda b=bucket: b.full,
                    Role.SHARD: lambda b=bucket: b.shard,
                    Role.MASTER: lambda b=bucket: b.master,
                    Role.STATE: lambda b=bucket, n=what.name: b.flat[n],
                    Role.SCALAR_STATE: lambda b=bucket, n=what.name: b.scalars[n],
                }[what.role]()
        return tensors

    def _batch_tensors(self, compiled: CompiledStep, batch: Batch) -> dict[str, torch.Tensor]:
        by_name = dict(zip(batch.names, batch.tensors, strict=True))
        dtype = self.options.compute_dtype
        found = {}
        for node in compiled.graph.placeholders(Role.INPUT):
            given = by_name[placeholder(node).name].detach()
            found[node.name] = given.to(dtype) if dtype is not None and given.is_floating_point() else given
        return found

    # ------------------------------------------------------------------------------------------------ building

    def _step_for(self, batch: Batch) -> CompiledStep:
        if self._closed:
            raise UsageError("expected a step that is open, found one after close(): compile the model again")
        if self._showing:
            raise UsageError("expected step(batch) outside full_parameters(), found it inside: leave the block first")
        self._check_world()
        signature = batch.signature() + ("; training" if self.model.training else "; eval")
        if len(self._steps) > 1:
            self._agree(signature)
        if signature not in self._steps:
            self._steps[signature] = self._build(batch, signature)
        self._latest = self._steps[signature]
        return self._latest

    def _agree(self, signature: str) -> None:
        values = self._control.gather(signature, "call step(batch)")
        check_equal(values, "batch shapes", "Give every rank batches of the same shapes, for example by padding.")

    def _check_world(self) -> None:
        now = torch.distributed.get_world_size(process_group()) if process_group() is not None else 1
        if now != self._control.num_ranks:
            raise RankMismatchError(
                f"expected the world of {self._control.num_ranks} rank(s) that the model was compiled in, found {now}: "
                f"save full_state_dict() before, and compile again after the world changed"
            )

    def _build(self, batch: Batch, signature: str) -> CompiledStep:
        if len(self._steps) >= self.options.max_shapes:
            raise UsageError(
                f"expected at most {self.options.max_shapes} batch shapes, found another: {self._difference(signature)}. "
                f"Pad batches to few shapes, or raise max_shapes"
            )
        if self._steps:
            warnings.warn(
                f"a batch of another shape is captured and planned anew: {self._difference(signature)}",
                ZeroFXWarning,
                stacklevel=5,
            )
        captured = self._capture_on_all_ranks(batch, signature)
        if self.options.backend == "inductor":
            from zerofx.codegen.inductor import check_compiler

            check_compiler(captured.device)
        groups = group_of_parameters(self.model, self.optimizer, captured.parameters, set(captured.gradients))
        layout = self._layout or layout_of(captured, groups, self._control.num_ranks)
        self._check_gradients(captured, layout)
        binding = self._binding or OptimizerBinding(
            self.optimizer, layout, captured.device, prefer_fused=self.options.backend == "inductor"
        )
        programs = binding.programs(self._state)
        machine = self._machine or _machine_at_hand(captured.device)
        compiled = self._fit(captured, layout, programs, machine)
        if self._state is None:
            self._take_over(layout, binding, captured.device)
        assert self._state is not None
        for bucket in layout.buckets:
            if bucket.trainable:
                self._state.new_states(bucket, programs[bucket.index], captured.device)
        self._machine = machine
        return compiled

    def _fit(
        self, captured: StepGraph, layout: BucketLayout, programs: Mapping[int, UpdateProgram], machine: Machine
    ) -> CompiledStep:
        """Plan and build the step; a budget holds for the compiled regions too.

        What a compiled region holds inside is known once it is compiled. Where that takes the step over the budget, the
        plan is made again for as much less as it took more.
        """
        budget = budget_bytes(self.options.memory_budget, machine)
        target = budget
        for _ in range(_FIT_ROUNDS):
            plan = self._agree_on_plan(captured, layout, programs, machine, target)
            lowered = lower(
                captured.clone(), plan, layout, programs, machine, self.settings, talk=self._control.rank == 0
            )
            compiled = build(lowered, layout, self.settings, self._control, self.options.backend)
            over = compiled.plan.peak_bytes["device"] - (budget or math.inf)
            if over <= 0 or target is None or self.options.plan is not None:
                return compiled
            target = min(target, lowered.plan.peak_bytes["device"]) - int(over)
        raise MemoryBudgetError(
            f"memory_budget={budget} bytes cannot be met with compiled regions: the last plan needs "
            f"{compiled.plan.peak_bytes['device']} bytes; allow as much, or use backend='eager'"
        )

    def _capture_on_all_ranks(self, batch: Batch, signature: str) -> StepGraph:
        """Capture here; if that fails on any rank, it fails on all."""
        failure: ZeroFXError | None = None
        captured: StepGraph | None = None
        try:
            with self._unguarded():
                captured = capture(
                    self.model, batch, loss_fn=self.options.loss_fn, compute_dtype=self.options.compute_dtype
                )
            if "simplify" not in self.settings.disable:
                simplify(captured)
        except ZeroFXError as error:
            failure = error
        seen = self._control.gather(
            (signature, captured.fingerprint() if captured else "", str(failure or "")), "capture a step"
        )
        if failure is not None:
            raise failure
        for rank, (_, _, message) in enumerate(seen):
            if message:
                raise RankMismatchError(f"the step could not be captured on rank {rank}: {message}")
        check_equal([s[0] for s in seen], "batch shapes", "Give every rank batches of the same shapes.")
        check_equal([s[1] for s in seen], "model (graph fingerprint)", "Build the same model on every rank.")
        assert captured is not None
        return captured

    def _check_gradients(self, captured: StepGraph, layout: BucketLayout) -> None:
        trained = {slot.name for bucket in layout.buckets if bucket.trainable for slot in bucket.slots}
        changed = sorted(trained ^ set(captured.gradients))
        if changed:
            raise UsageError(
                f"expected a gradient for the parameters that the first batch trained, found a difference in "
                f"{', '.join(changed[:5])}: parameters must be trained, or not, in every step"
            )

    def _agree_on_plan(
        self,
        captured: StepGraph,
        layout: BucketLayout,
        programs: Mapping[int, UpdateProgram],
        machine: Machine,
        memory_budget: int | None,
    ) -> Plan:
        """Rank 0's plan, on all ranks; what fails there fails everywhere."""
        plan: Plan | None = self.options.plan
        failure: ZeroFXError | None = None
        if plan is None and self._control.rank == 0:
            try:
                plan = make_plan(captured, layout, programs, machine, self.options, self.settings, memory_budget)
            except ZeroFXError as error:
                failure = error
        message = self._control.from_rank_0(
            (plan.to_json() if plan else "", type(failure), str(failure or "")), "share the plan"
        )
        text, kind, why = message
        if why:
            raise failure or kind(why)
        shared = Plan.from_json(text)
        if shared.graph != captured.fingerprint() or shared.num_ranks != layout.num_ranks:
            raise PlanError(
                f"expected a plan for this graph ({captured.fingerprint()[:12]}) on {layout.num_ranks} rank(s), found one "
                f"for graph {shared.graph[:12]} on {shared.num_ranks}: make the plan anew"
            )
        hashes = self._control.gather(shared.decisions_hash(), "compare plans")
        check_equal(hashes, "plan", "This is a defect of zerofx: a plan changed on its way between ranks.")
        return shared

    def _take_over(self, layout: BucketLayout, binding: OptimizerBinding, device: torch.device) -> None:
        transport = make_transport(self._group, device)
        state = TrainingState(self.model, layout, self.options.stage, transport)
        state.take_over()
        self._layout, self._binding, self._state, self._device = layout, binding, state, device
        self._runtime = Runtime(layout, transport, device)
        self._optimizer_state = OptimizerState(self.optimizer, state, self._control)
        setattr(self.model, _MARK, True)
        if not state.resident:
            self._guards = [
                *(m.register_forward_pre_hook(self._refuse_forward) for m in _parameter_owners(self.model)),
                self.model.register_state_dict_pre_hook(self._refuse_state_dict),
            ]

    def _difference(self, signature: str) -> str:
        """What the nearest known signature has otherwise."""
        known = max(self._steps, key=lambda s: sum(a == b for a, b in zip(s.split("; "), signature.split("; "), strict=False)))
        changed = [
            f"{new} (was {old})"
            for old, new in zip(known.split("; "), signature.split("; "), strict=False)
            if old != new
        ]
        return ", ".join(changed) or signature

    # ------------------------------------------------------------------------------------------------ the model

    def _refuse_forward(self, module: nn.Module, _args: Any) -> None:
        if not self._showing:
            raise ShardedParametersError(
                f"expected {type(module).__name__} to be called with its whole parameters, found them divided over "
                f"{self._control.num_ranks} rank(s) by the compiled step: call it inside `with step.full_parameters():` "
                f"(on every rank)"
            )

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self._showing:
            raise ShardedParametersError(
                "expected model.state_dict() where the parameters are whole, found them divided by the compiled step: "
                "use step.full_state_dict(), or call it inside `with step.full_parameters():` (on every rank)"
            )

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

        Before the first step this is the model as it is.
        """
        if self._state is None:
            yield self.model
            return
        if self._showing:
            yield self.model
            return
        self._control.meet("enter full_parameters()")
        if not self._state.resident:
            self._state.show_parameters()
        self._showing = True
        try:
            yield self.model
        finally:
            self._showing = False
            if write_back:
                self._state.write_back()
            self._state.hide_parameters()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """``model.state_dict()`` with whole, trained parameters, as copies on the CPU, on every rank. Collective."""
        with self.full_parameters():
            return {
                name: tensor.detach().to("cpu", copy=True) if isinstance(tensor, torch.Tensor) else tensor
                for name, tensor in self.model.state_dict().items()
            }

    def close(self) -> None:
        """Give the model its whole parameters and the optimizer its states back, and let go of both. Collective."""
        if self._closed:
            return
        self._closed = True
        if self._state is None:
            return
        self._control.meet("close the step")
        for guard in self._guards:
            guard.remove()
        self._state.show_parameters()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
        assert self._optimizer_state is not None
        self._optimizer_state.give_back()
        delattr(self.model, _MARK)

    # ------------------------------------------------------------------------------------------------ seeing

    @property
    def compiled(self) -> CompiledStep:
        """The step that ran last.

        Raises:
            UsageError: none has been captured yet.
        """
        if self._latest is None:
            raise UsageError(
                "expected a captured step, found none yet: call step(batch) or step.prepare(batch), or give compile an "
                "example_batch"
            )
        return self._latest

    @property
    def plan(self) -> Plan:
        """The decisions and predictions of the step that ran last."""
        return self.compiled.plan

    @property
    def source(self) -> str:
        """The generated Python file of the step that ran last."""
        return self.compiled.emitted.source

    @property
    def source_path(self) -> Path:
        """Where rank 0 wrote ``source``."""
        return self.compiled.source_path

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The captured graph and the graph behind each pass."""
        return self.compiled.stages

    @property
    def num_regions(self) -> int:
        """Regions that the step runs."""
        return self.compiled.num_regions

    @property
    def num_distinct_regions(self) -> int:
        """Regions of different structure: what had to be compiled, whatever the depth."""
        return self.compiled.num_distinct_regions

    def load(self, path: str | Path) -> None:
        """Run an edited copy of ``source`` in the place of the step that ran last.

        Raises:
            PlanError: the file cannot be loaded.
        """
        compiled = self.compiled
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"expected a generated step at {path}: {error}") from error
        function, _ = load_step(
            text, str(path), compiled.instructions, compiled.emitted.functions, self._control, self.options.backend
        )
        replaced = replace(compiled, function=function, source_path=Path(path), emitted=replace(compiled.emitted, source=text))
        self._steps = {key: replaced if value is compiled else value for key, value in self._steps.items()}
        self._latest = replaced


def _parameter_owners(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if m is model or any(True for _ in m.parameters(recurse=False))]


def _machine_at_hand(device: torch.device) -> Machine:
    """The built-in row of the device, or the plain CPU's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = machine_of_device(properties.name, properties.total_memory)
        if found is not None:
            return found
        warnings.warn(
            f"no machine row for {properties.name}: predicted times are an H100's; give machine=Machine.measure()",
            ZeroFXWarning,
            stacklevel=2,
        )
        return Machine.named("h100-sxm")
    return Machine.named("cpu")
