"""Plans kept on disk: what a search has found for equal graph, layout, optimizer, machine and options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zerofx.capture.trace import tracing_settings
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.disk.cache import DiskCache, key_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.canonical import canonical
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError
from zerofx.scheduler.search.evaluate import Estimates
from zerofx.scheduler.search.planner import make_plan
from zerofx.settings import Settings
from zerofx.torch_private.profiler import is_profiling


def kept_plan(
    captured: StepGraph,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    *,
    on_cpu: bool,
    talk: bool = True,
    estimates: Estimates | None = None,
    found: Estimates | None = None,
) -> Plan:
    """What ``make_plan`` gives without measured costs, or gave in an earlier run for the same question.

    Arguments as there; ``found`` are those of ``estimates`` that were read from compiled regions. A search that finds
    no plan is kept too: which of several numbers of micro-batches is taken depends on those that do not fit.

    Raises:
        MemoryBudgetError: as ``make_plan``.
        UsageError: as ``make_plan``.
    """

    def search() -> Plan:
        return make_plan(
            captured, layout, programs, machine, options, settings, memory_budget,
            on_cpu=on_cpu, talk=talk, estimates=estimates,
        )  # fmt: skip

    cache = DiskCache(settings.cache_dir)
    # Without a search a plan is made in less time than is needed to find one.
    searched = memory_budget is not None or options.recompute == "full" or options.wire != "exact"
    if cache.folder is None or not searched:
        return search()
    parts = (
        captured.text(), canonical(captured.graph), str(captured.device), repr(captured.parameters),
        repr(sorted(captured.units)), repr((captured.mutation_names, captured.gradient_names, captured.slices)),
        f"{captured.num_extras} extras",
        repr((captured.num_micro_batches, on_cpu)), repr(sorted((found or {}).items())),
        repr(layout), repr(machine), repr(memory_budget), repr(sorted(settings.disable)),
        *tracing_settings(),  # which library has an operator's kernel, and in vectors of which width
        f"{torch.get_num_threads()} threads",  # each takes memory of its own
        repr(sorted(kernels_in_use(settings.kernels, captured.device))),
        *options.texts("plan"),
        *(f"{index}: {_program_text(program)}" for index, program in sorted(programs.items())),
    )  # fmt: skip
    key = key_of("plan", parts)
    answer = cache.read_as(key, Answer.from_json)
    if answer is None:
        text = _searched(search)
        if not is_profiling():  # what some operators take is not known then
            cache.write(key, text)
        # The run that has searched goes on with what the next one will read.
        answer = Answer.from_json(text)
    if answer.plan is None:
        raise BudgetMissedError(answer.refusal, answer.least_bytes)
    return answer.plan


@dataclass(frozen=True)
class Answer:
    """What a search has come to: a plan, or why there is none, and with how many bytes there would be one."""

    plan: Plan | None
    refusal: str
    least_bytes: int

    @staticmethod
    def from_json(text: str) -> Answer:
        data = json.loads(text)
        if "refusal" in data:
            return Answer(None, str(data["refusal"]), int(data["least_bytes"]))
        return Answer(Plan.from_json(data["plan"]), "", 0)


def _searched(search: Callable[[], Plan]) -> str:
    try:
        return json.dumps({"plan": search().to_json()})
    except BudgetMissedError as refusal:
        return json.dumps({"refusal": str(refusal), "least_bytes": refusal.least_bytes})


def _program_text(program: UpdateProgram) -> str:
    state = sorted(program.state_before), sorted(program.state_after), program.tensor_scalars, program.num_scalars
    return f"{program.optimizer} {program.dtype} {program.fused} {program.first_step_only} {state}\n" + "\n".join(
        map(str, (program.states, program.scalar_states, program.host_source, program.graph))
    )
