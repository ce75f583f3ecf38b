"""What a user can see of the step that ran last."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.lowering.load import CompiledStep
from zerofx.pipeline import Stage
from zerofx.report.saved import SavedPlan
from zerofx.report.schedule import Schedule, make_schedule
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan


class LatestStep:
    """The plan, the source and the schedule of the step that ran last, for ``Step`` to inherit."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    _machine: Machine | None
    _latest: CompiledStep | None = None

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
        """The captured graph and the graph after each pass."""
        return self.compiled.stages

    @property
    def num_regions(self) -> int:
        """Regions that the step runs."""
        return self.compiled.num_regions

    @property
    def num_distinct_regions(self) -> int:
        """Regions of different structure: what had to be compiled, whatever the depth."""
        return self.compiled.num_distinct_regions

    def schedule(self) -> Schedule:
        """What the step that ran last does, in order: a row for each node with its bytes, time, stream and origin."""
        return make_schedule(self.compiled.lowered)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan of the step that ran last with its schedule, for ``compile(plan=path)`` and ``zerofx report``.

        On this rank alone; rank 0 is enough, since all ranks have the same plan.
        """
        assert self._machine is not None, "a captured step has one"
        what = f"{type(self.model).__name__} with {type(self.optimizer).__name__}"
        SavedPlan.of(self.compiled.lowered, self._machine, what).save(path)
