"""Into how many micro-batches a batch is divided: as many as were asked for, or the number whose plan is fastest.

More micro-batches hold fewer activations at a time, and so need less of what a memory budget costs otherwise. Each
brings smaller operators and, where parameters are sharded, gathers of its own. So the fewest that fit are tried first,
and more as long as that is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes, format_seconds

_SLACK = 1.02  # an estimate that is over the budget by less than this does not rule a number out


@dataclass(frozen=True)
class MicroBatches:
    """The number that was asked for, or of several the one with the fastest plan that fits."""

    name: str = "micro-batches"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        variants, budget = problem.variants, problem.memory_budget
        # Without a budget there is no reason to take more than the least.
        candidates = variants.candidates if budget is not None else variants.candidates[:1]
        if len(candidates) == 1 or budget is None:
            plan = rest.attempt(f"{candidates[0]}, as asked", problem.replace_variants(variants, candidates[0]))
            return replace(plan, micro_batches_reason="as asked")
        refusals: dict[int, BudgetMissedError] = {}
        fitting: dict[int, Plan] = {}
        best: Plan | None = None
        for number in candidates:
            # The most are always tried before giving up: the refusal then says the least that is possible.
            ruled_out = _least_bytes(refusals, number) > _SLACK * budget
            if ruled_out and (best is not None or number != candidates[-1]):
                rest.say(f"{number}: not tried, by what fewer needed it does not fit")
                continue
            try:
                plan = fitting[number] = rest.attempt(f"{number}", problem.replace_variants(variants, number))
            except BudgetMissedError as refusal:
                refusals[number] = refusal
                continue
            if best is not None and plan.step_seconds >= best.step_seconds:
                rest.say("more are not tried: these are slower than fewer")
                break
            best = plan
            if not (plan.recomputes or plan.offloads or plan.states or plan.parameters or plan.gradients):
                rest.say("more are not tried: nothing was given up for the budget that they could win back")
                break
        if best is None:
            raise min(refusals.values(), key=lambda refusal: refusal.least_bytes)
        others = [f"{number} need {format_bytes(refusal.least_bytes)}" for number, refusal in refusals.items()]
        others += [f"{n} take {format_seconds(plan.step_seconds)}" for n, plan in fitting.items() if plan is not best]
        return replace(best, micro_batches_reason="; ".join(["the fastest that fits the memory budget", *others]))


def _least_bytes(refusals: Mapping[int, BudgetMissedError], number: int) -> float:
    """Bytes that ``number`` micro-batches need at least, judged by those that did not fit; 0 where they tell nothing.

    What micro-batches share stays, and what each holds goes with 1 / number: two refusals give both. A single
    micro-batch is no guide, since it holds no gradients from one micro-batch to the next.
    """
    known = [tried for tried in refusals if tried > 1][-2:]
    if len(known) < 2:
        return 0.0
    (few, more), (most, least) = known, [refusals[tried].least_bytes for tried in known]
    divided = (most - least) / (1 / few - 1 / more)
    return least - divided / more + divided / number
