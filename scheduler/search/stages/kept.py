"""Plans kept on disk: what a search has found for equal graph, layout, optimizer, machine and options."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from zerofx.capture.cache import trace_settings
from zerofx.disk.cache import DiskCache, key_of
from zerofx.ir.canonical import graph_parts
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.torch_private.profiler import is_profiling


@dataclass(frozen=True)
class KeptPlans:
    """Reads what the later stages found for an equal problem in an earlier run; else they run, and it is written.

    A search that finds no plan is kept too: which of several numbers of micro-batches is taken depends on those that
    do not fit. What follows from measured costs is not kept.
    """

    name: str = "kept plans"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        target, options = problem.target, problem.options
        cache = DiskCache(target.settings.cache_dir)
        # Without a search a plan is made in less time than is needed to find one.
        searched = problem.memory_budget is not None or options.recompute == "full" or options.wire != "exact"
        if cache.folder is None or not searched or target.costs is not None:
            return rest.plan(problem)
        key = _key(problem)
        answer = cache.read_as(key, Answer.from_json)
        rest.say("none for this problem" if answer is None else "read what an earlier run has found")
        if answer is None:
            text = _search_to_json(problem, rest)
            if not is_profiling():  # what some operators take is not known then
                cache.write(key, text)
            # The run that has searched goes on with what the next one will read.
            answer = Answer.from_json(text)
        if answer.plan is None:
            raise BudgetMissedError(answer.refusal, answer.least_bytes)
        return answer.plan


@dataclass(frozen=True)
class Answer:
    """Result of a search: a plan, or why there is none, and with how many bytes there would be one."""

    plan: Plan | None
    refusal: str
    least_bytes: int

    @staticmethod
    def from_json(text: str) -> Answer:
        data = json.loads(text)
        if "refusal" in data:
            return Answer(None, str(data["refusal"]), int(data["least_bytes"]))
        return Answer(Plan.from_json(data["plan"]), "", 0)


def _key(problem: Problem) -> str:
    target = problem.target
    parts = (
        *graph_parts(problem.step), str(target.on_cpu), repr(sorted(target.measured_regions.items())),
        repr(problem.layout), repr(problem.machine), repr(problem.memory_budget), repr(problem.locations),
        repr(problem.fixed),
        repr(sorted(target.settings.disable)),
        *trace_settings(),  # which library has an operator's kernel, and in vectors of which width
        f"{torch.get_num_threads()} threads",  # each takes memory of its own
        repr(sorted(target.kernels)),
        *problem.options.texts("plan"),
        *(f"{index}: {program.text}" for index, program in sorted(problem.rehearsal.programs.items())),
    )  # fmt: skip
    return key_of("plan", parts)


def _search_to_json(problem: Problem, rest: Search) -> str:
    try:
        return json.dumps({"plan": rest.plan(problem).to_json()})
    except BudgetMissedError as refusal:
        return json.dumps({"refusal": str(refusal), "least_bytes": refusal.least_bytes})
