"""A plan and its schedule in one file, from which ``zerofx report`` makes a page.

The file is the plan's own JSON with one more entry, so that readers of plans can read it too. It contains the
schedule's instructions and memory curve; rows of single nodes, by far the largest part, are omitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zerofx.disk.own_files import read_named, write_named
from zerofx.errors import PlanError
from zerofx.json_format import from_data
from zerofx.lowering.lower import LoweredStep
from zerofx.report.schedule import Schedule, make_schedule
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan, stage_path

_ENTRY = "report"


@dataclass(frozen=True)
class SavedPlan:
    """A plan with its schedule (without rows of single nodes), a heading, and memory limits in bytes, by name."""

    plan: Plan
    schedule: Schedule
    title: str
    limits: Mapping[str, int]

    @staticmethod
    def from_lowered(lowered: LoweredStep, machine: Machine, what: str = "") -> SavedPlan:
        """The plan of a step; ``what`` is for the heading: the names of model and optimizer, say."""
        plan = lowered.plan
        precision = f", {plan.precision}" if plan.precision else ""
        title = f"{what}{': ' if what else ''}stage {plan.stage} on {plan.num_ranks} x {plan.machine}{precision}"
        budget = {} if plan.memory_budget is None else {"memory budget": plan.memory_budget}
        limits = {**budget, "memory of the device": machine.device.memory_bytes}
        return SavedPlan(plan, make_schedule(lowered), title, limits)

    def save(self, path: str | Path) -> None:
        """Write the file, of a stage that of its own (``Plan.save``); one that exists is replaced."""
        entry = {"title": self.title, "limits": dict(self.limits), **asdict(replace(self.schedule, rows=()))}
        text = json.dumps({**json.loads(self.plan.to_json()), _ENTRY: entry}, separators=(",", ":"))
        write_named(stage_path(path, self.plan.pipe_stage, self.plan.pipe), text)

    @staticmethod
    def load(path: str | Path) -> SavedPlan:
        """Read a file that ``save`` has written.

        Raises:
            PlanError: there is no such file, or it has no plan, or no schedule.
        """
        plan = Plan.load(path)
        entry = json.loads(read_named(path)).get(_ENTRY)
        if entry is None:
            raise PlanError(
                f"expected a plan with its schedule in {path}, found the plan alone: save it with "
                f"step.save_plan(path), planned.save(path), or `zerofx plan ... --save`"
            )
        try:
            title, limits = entry.pop("title"), entry.pop("limits")
            return SavedPlan(
                plan, from_data(Schedule, entry), str(title), {name: int(limit) for name, limit in limits.items()}
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise PlanError(
                f"expected the schedule of this version of zerofx in {path}, found another: {error!r}; save it again"
            ) from error

    def to_html(self, path: str | Path) -> None:
        """Write the page of the schedule (``Schedule.to_html``), with the plan at its end."""
        self.schedule.to_html(path, self.title, limits=self.limits, notes=str(self.plan))
