"""Into how many micro-batches a batch is divided: as many as were asked for, or the number whose plan is fastest.

More micro-batches hold fewer activations at a time, and so need less of what a memory budget costs otherwise. Each
brings smaller operators and, where parameters are sharded, gathers of its own. So the fewest that fit are tried first,
and more as long as that is faster.

They run one after the other, or layer by layer: parameters then come, and gradients go, once a step rather than once a
micro-batch, and what layers hand on is held for all micro-batches (``passes/prepare/accumulate.py``). That is tried
within a budget where computation waits for communication or copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerofx.errors import UsageError
from zerofx.ir.facts import origin
from zerofx.passes.lib.draws_ahead import find_unforeseen_draw
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem, needs_least
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes, format_seconds

_EXPOSED = 0.01  # of a step: less is not worth another search
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
            plan = _order(problem, rest, candidates[0], f"{candidates[0]}, as asked")
            # Of stages it is chosen for all together.
            is_chosen = problem.step.pipe is not None and problem.options.accumulate == "auto"
            asked = "" if is_chosen else "as asked"
            return replace(plan, micro_batches_reason="; ".join(filter(None, [asked, plan.micro_batches_reason])))
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
                plan = fitting[number] = _order(problem, rest, number, f"{number}")
            except BudgetMissedError as refusal:
                refusals[number] = refusal
                continue
            if best is not None and plan.step_seconds >= best.step_seconds:
                rest.say("more are not tried: these are slower than fewer")
                break
            best = plan
            if not plan.absences:
                rest.say("more are not tried: nothing was given up for the budget that they could win back")
                break
        if best is None:
            raise needs_least([*refusals.values()])
        others = [f"{number} need {format_bytes(refusal.least_bytes)}" for number, refusal in refusals.items()]
        others += [f"{n} take {format_seconds(plan.step_seconds)}" for n, plan in fitting.items() if plan is not best]
        reasons = ["the fastest that fits the memory budget", *others, *filter(None, [best.micro_batches_reason])]
        return replace(best, micro_batches_reason="; ".join(reasons))


def _order(problem: Problem, rest: Search, number: int, what: str) -> Plan:
    """The plan for a number of micro-batches, in the order that is asked for or else the faster one; its reason says
    why they run layer by layer.

    Raises:
        BudgetMissedError: no plan fits the budget in any order.
    """
    options, variants = problem.options, problem.variants
    asked, one_by_one = options.order, options.reduce == "each" or isinstance(options.offload, Mapping)
    if problem.step.pipe is not None:  # which of both is settled for all stages together
        variant = problem.replace_variants(variants, number, by_layer=number > 1 and asked == "layer")
        return rest.attempt(what, variant)
    if number == 1 or asked == "micro-batch" or (asked == "auto" and (problem.memory_budget is None or one_by_one)):
        return rest.attempt(what, problem.replace_variants(variants, number))
    by_layer = problem.replace_variants(variants, number, by_layer=True)
    draws = find_unforeseen_draw(by_layer.step)
    if asked == "layer":
        if draws is not None:
            raise UsageError(
                f"expected random operators whose draws depend on shapes alone with order='layer', found "
                f"{draws.target} in {origin(draws).layer or 'the model'}: leave order= out"
            )
        return replace(
            rest.attempt(f"{what}, layer by layer", by_layer), micro_batches_reason="layer by layer, as asked"
        )
    plans, refusals = dict[str, Plan](), list[BudgetMissedError]()
    for order, variant in (("", problem.replace_variants(variants, number)), (", layer by layer", by_layer)):
        first = plans.get("")
        waits = first is None or first.exposed_seconds >= _EXPOSED * first.step_seconds
        if order and (draws is not None or not waits):
            break
        try:
            plans[order] = rest.attempt(f"{what}{order}", variant)
        except BudgetMissedError as missed:
            refusals.append(missed)
    if not plans:
        raise needs_least(refusals)
    best = min(plans.values(), key=lambda plan: plan.step_seconds)
    if not best.by_layer:
        return best
    instead = format_seconds(plans[""].step_seconds) if "" in plans else "no plan that fits"
    reason = f"layer by layer, {format_seconds(best.step_seconds)} rather than {instead}"
    return replace(best, micro_batches_reason=reason)


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
