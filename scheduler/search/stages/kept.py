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
        answer, refusal = cache.read_as(key, Answer.from_json), None
        rest.say("none for this problem" if answer is None else "read what an earlier run has found")
        if answer is None:
            try:
                answer = Answer(rest.plan(problem))
            except BudgetMissedError as missed:
                answer, refusal = Answer(), missed
            # The run that has searched goes on with what the next one will read.
            answer = Answer.from_json(_keep(answer, cache, key))
        if answer.plan is not None:
            return answer.plan
        if answer.refusal:
            raise BudgetMissedError(answer.refusal, answer.least_bytes)

        def explain() -> BudgetMissedError:
            explained = refusal or _refusal_of(problem, rest)
            _keep(Answer(None, str(explained), explained.least_bytes), cache, key)
            return explained

        raise BudgetMissedError(explain=explain)


@dataclass(frozen=True)
class Answer:
    """Result of a search: a plan, or that there is none; why, and with how many bytes there would be one, where that
    has been asked for."""

    plan: Plan | None = None
    refusal: str = ""
    least_bytes: int = 0

    def to_json(self) -> str:
        plan = None if self.plan is None else self.plan.to_json()
        return json.dumps({"plan": plan, "refusal": self.refusal, "least_bytes": self.least_bytes})

    @staticmethod
    def from_json(text: str) -> Answer:
        data = json.loads(text)
        plan = None if data["plan"] is None else Plan.from_json(data["plan"])
        return Answer(plan, str(data["refusal"]), int(data["least_bytes"]))


def _keep(answer: Answer, cache: DiskCache, key: str) -> str:
    """The text of an answer, written to disk."""
    text = answer.to_json()
    if not is_profiling():  # what some operators take is not known then
        cache.write(key, text)
    return text


def _refusal_of(problem: Problem, rest: Search) -> BudgetMissedError:
    """The refusal that an earlier run has found, and not explained."""
    try:
        rest.plan(problem)
    except BudgetMissedError as refusal:
        return refusal
    raise AssertionError("a search that found no plan finds none again")


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
