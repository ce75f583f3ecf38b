"""Reports of a step: its plan and source, where its bytes are, numbers of what ran last, what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.lengths.padded_batches import Rung
from zerofx.lowering.load import CompiledStep
from zerofx.option_checks import check_count
from zerofx.options import CompileOptions
from zerofx.pipeline import GraphStage
from zerofx.report.saved import SavedPlan
from zerofx.report.schedule import Schedule, make_schedule
from zerofx.runtime.cuda_graphs.graphed import GraphedSteps, Launches
from zerofx.runtime.measure.measure import Measurement, Meter
from zerofx.scheduler.cost.cpu.peaks import refuse_profilers
from zerofx.scheduler.plan.plan import Plan
from zerofx.session.batches.rungs import Rungs
from zerofx.session.evaluations import Evaluations
from zerofx.session.life import Life
from zerofx.session.metrics import LastStep, Metrics, average
from zerofx.session.steps import Steps
from zerofx.session.summary import summary
from zerofx.torch_private.profiler import is_profiling

# A loss scale of 2^16 is below the least number that float32 has after as many steps.
_MOST_SKIPPED = 200


class Reported:
    """The part of a ``Step`` that reports."""

    model: nn.Module
    options: CompileOptions
    num_steps: int
    num_skipped: int
    num_repeated: int
    _steps: Steps
    _evaluations: Evaluations
    _graphs: GraphedSteps
    _life: Life
    _outputs: Any
    _grad_norm: torch.Tensor | None
    _last: LastStep
    __call__: Callable[..., Any]
    _meter: Meter | None
    _rungs: Rungs
    _measured: tuple[CompiledStep, Measurement] | None

    def __repr__(self) -> str:
        return f"<zerofx.Step of {type(self.model).__name__}, stage {self.options.stage}, {self.num_steps} steps done>"

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that were given to ``zerofx.compile``, in their order."""
        return self._steps.optimizers.users

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of a step that has one.

        Raises:
            UsageError: it has several.
        """
        if len(self.optimizers) > 1:
            raise UsageError(
                f"expected step.optimizer of a step with one optimizer, found {self._steps.optimizers.name}: read "
                f"step.optimizers"
            )
        return self.optimizers[0]

    @property
    def is_prepared(self) -> bool:
        """True if the step holds the model: once it has been prepared, or has run, and until it is closed."""
        return self._steps.taken is not None

    @property
    def is_closed(self) -> bool:
        """True once the model and the optimizer have been given back."""
        return self._life.closed

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

    @property
    def outputs(self) -> Any:
        """The result of the model, or ``loss_fn``, with its loss in the step that ran last, detached, of this rank.

        It has the structure in which it was returned: a dict of metrics, say. Unless ``outputs="all"`` asks for all,
        None is in the place of tensors with more than one element; and there are no outputs, but None, where only the
        loss would be left. With ``accumulate`` other than 1 it is a list, of what each micro-batch gives. None, too,
        for a step that was left out. It is held until the next step begins. ``step.average(step.outputs)`` is the mean
        over all ranks.
        """
        return self._outputs

    def average(self, values: Any) -> Any:
        """The mean over all ranks of each number in a structure: a loss, or dicts and lists of numbers. Collective.

        Tensors of one element count as numbers, whose values the host waits for. What else is there stays as it is.

        Raises:
            RankMismatchError: ranks have other numbers of numbers.
        """
        self._life.check_open("average numbers")
        return average(values, self._life.control)

    @property
    def metrics(self) -> Metrics:
        """Numbers about the step that ran last, by name, for loggers: ``logger.log(step.metrics)``.

        ``step`` (how many have run), ``loss`` (this rank's), ``seconds`` (without building it), ``samples_per_second``
        and ``tokens_per_second`` (of all ranks; the first tensor of a batch says how many it has), ``skipped_steps``,
        ``peak_bytes`` (on the device) and ``exposed_seconds`` (in which computation waits for communication), as
        ``measure`` has found them, or else as planned; ``grad_norm``, that of each layer as
        ``grad_norm/layers.0``, ``loss_scale``, and, where ranks send each other rows of experts, ``repeated_steps``,
        run again as some had found no room, ``row_capacity``, room in equal shares, ``row_rounds``, in how many rounds
        they were sent, ``copied_experts``, of how many experts of a layer each rank had copies, and ``row_shares``, the
        most rows that a rank has had for another. Each is a Python number. The host
        waits for the device when ``loss``, ``seconds`` and what is a second's, ``grad_norm`` or ``row_shares`` are
        read, and not before.
        """
        compiled, scaler = self._steps.shapes.latest, self._steps.scaler
        predicted = self._measurement or (None if compiled is None else compiled.plan)
        return self._last.metrics(
            self.num_steps,
            self.num_skipped,
            self._row_numbers(compiled),
            self._grad_norm,
            None if scaler is None else scaler.scale,
            predicted,
        )

    def _row_numbers(self, compiled: CompiledStep | None) -> dict[str, float]:
        """Numbers about rows of experts that ranks send each other, if they do."""
        if compiled is None or not compiled.plan.sends_rows:
            return {}
        plan = compiled.plan
        return {
            "repeated_steps": self.num_repeated,
            "row_capacity": plan.row_capacity,
            "row_rounds": plan.num_row_rounds,
            "copied_experts": plan.num_copied_experts,
        }

    @property
    def _measurement(self) -> Measurement | None:
        """The measurement of the step that ran last, if there is one."""
        latest = self._steps.shapes.latest
        return self._measured[1] if self._measured is not None and self._measured[0] is latest else None

    @property
    def loss_scale(self) -> float:
        """The factor of the coming step's loss before backward; the loss that a step returns is not scaled.

        Raises:
            UsageError: losses are not scaled.
        """
        if self._steps.scaler is None:
            raise UsageError(
                "expected precision='fp16' or a loss_scale to be given to zerofx.compile, found neither, with which no "
                "loss is scaled"
            )
        return self._steps.scaler.scale

    def tiers(self) -> dict[str, int]:
        """Bytes that this rank holds between steps, by tier: ``device``, and ``host`` and ``nvme`` where used now.

        Raises:
            UsageError: no step has been captured yet, or the step is closed.
        """
        compiled = self.compiled
        if self._steps.taken is None:
            raise UsageError("expected to ask what is where before close(), found the step closed")
        return self._steps.taken.held_bytes(compiled.arguments)

    @property
    def notice(self) -> str:
        """The reason why messages between ranks are slower than they could be, as far as is known; empty for none."""
        return self._steps.taken.runtime.notice if self._steps.taken is not None else ""

    @property
    def compiled(self) -> CompiledStep:
        """The step that ran last.

        Raises:
            UsageError: none has been captured yet.
        """
        if self._steps.shapes.latest is None:
            raise UsageError(
                "expected a captured step, found none yet: call step(batch) or step.prepare(batch), or give compile an "
                "example_batch"
            )
        return self._steps.shapes.latest

    @property
    def evaluation(self) -> CompiledStep:
        """The evaluation that ran last: its ``plan``, its ``source_path``, its graph after each pass in
        ``lowered.stages``.

        Raises:
            UsageError: none has run yet.
        """
        if self._evaluations.shapes.latest is None:
            raise UsageError("expected an evaluation to have run, found none yet: call step.evaluate(batch) first")
        return self._evaluations.shapes.latest

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
        """The file that rank 0 wrote ``source`` to."""
        return self.compiled.source_path

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The lengths that batches are padded to for which a step has been built, the shortest first; none without
        ``lengths=``. Each has its ``length``, ``samples``, ``plan`` and ``num_steps``."""
        return () if self._steps.lengths is None else self._steps.lengths.rungs

    @property
    def stages(self) -> tuple[GraphStage, ...]:
        """The captured graph and the graph after each pass."""
        return self.compiled.lowered.stages

    @property
    def num_regions(self) -> int:
        """Regions that the step runs."""
        return self.compiled.num_regions

    @property
    def num_distinct_regions(self) -> int:
        """Regions of different structure: what had to be compiled, whatever the depth."""
        return len(self.compiled.emitted.functions)

    def schedule(self) -> Schedule:
        """The schedule of the step that ran last: a row for each node with its bytes, time, stream and origin."""
        return make_schedule(self.compiled.lowered)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan of the step that ran last with its schedule, for ``compile(plan=path)`` and ``zerofx report``.

        On this rank alone; rank 0 is enough, since all ranks have the same plan. In stages one rank of each has to:
        they have files of their own, ``plan-1-of-2.json`` for ``plan.json``, and ``plan=`` is given the path as here.
        """
        assert self._steps.machine is not None, "a captured step has one"
        SavedPlan.from_lowered(self.compiled.lowered, self._steps.machine, self._steps.what).save(path)

    def __str__(self) -> str:
        return summary(self, self._steps.what, self._steps.shapes.latest, self._measurement)

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        """Measure what the plan predicts. This trains: it is ``num_steps`` steps on this batch. Collective.

        Memory is that of the last step: give more than one where the step has not run yet, since libraries take memory
        in their first. On CPU torch's profiler records it, and it is left out of the times if there are others.
        ``print(step)`` compares the outcome with the predictions. Steps that are left out for what is not finite are
        run besides, and not measured.

        Raises:
            UsageError: ``num_steps`` is less than one, or, on CPU, a profiler runs on some rank; nothing has run then.
                Or one step after the other is left out.
        """
        self._check_measurable(num_steps, "measure a step")
        with self._life.turn("prepare a step", self._steps.device):
            self._rungs.prepare(self._steps.batch_of(args, kwargs))
        meter = self._meter = Meter(self._steps.device, num_steps)
        try:
            first_skipped = self.num_skipped
            while meter.num_runs < num_steps:
                with meter.whole_step():
                    self(*args, **kwargs)
                if self.num_skipped - first_skipped > _MOST_SKIPPED:
                    raise UsageError(
                        f"expected steps whose losses and gradients are finite to measure, found {_MOST_SKIPPED} that "
                        f"were left out since they are not: measure with another batch"
                    )
        finally:
            meter.close()
            self._meter = None
        assert self._steps.taken is not None
        measurement = meter.result(self.compiled.lowered.graph, self._steps.taken.layout, self.plan.stage)
        self._measured = self.compiled, measurement
        return measurement

    def measure_evaluation(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        """Measure what the plan of an evaluation predicts, by ``num_steps`` evaluations. Collective.

        Raises:
            UsageError: as ``measure``.
            ZeroFXError: as ``evaluate``.
        """
        self._check_measurable(num_steps, "measure an evaluation")
        with self._life.turn("measure an evaluation", self._steps.device):
            return self._evaluations.measure(args, kwargs, num_steps)

    def _check_measurable(self, num_steps: int, purpose: str) -> None:
        check_count("num_steps", num_steps, 1, f"to be how often to {purpose}, 1 or more")
        self._life.check_open(purpose)
        if self._steps.device.type == "cpu":
            refuse_profilers(self._life.control.gather(is_profiling(), purpose))

    @property
    def launches(self) -> Launches:
        """Launches of the kernels of the step that ran last: as CUDA graphs, or one by one and why.

        Raises:
            UsageError: no step has been captured yet.
        """
        return self._graphs.launches(self.compiled)
