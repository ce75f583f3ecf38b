"""The rungs of an escalation: what is tiled where no plan fits without it.

Where no plan fits, and the user allows it, logits are tiled (``scheduler/analysis/loss_heads.py``) and all is tried
again; then chains of operators between which values are large (``scheduler/analysis/tile_chains.py``) as well, into
more and more tiles. That comes last because it alone does not train the same bits. Each rung is turned to where none
before it fits. What the user has tiled by name is, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerofx.ir.facts import Role, tensor
from zerofx.progress import watch_progress
from zerofx.scheduler.decide.tiling import Tiles, rungs
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.prefixes import Prefixes, least
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.question import Question
from zerofx.scheduler.search.stage import Search, outcome
from zerofx.scheduler.search.stages.moves import OutOfReachError
from zerofx.units import format_bytes


@dataclass(frozen=True)
class Rungs:
    """The plan of the first rung on which one fits."""

    name: str = "rungs"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        question = problem.question()
        asked = question.tiles
        ladder = [[asked]] if asked else rungs(question.step, question.tile, classes=question.tile_classes)
        orders: list[Prefixes] = []
        for rung in ladder:
            questions = tuple(divided for tiles in rung for divided in question.retile(tiles).divisions)
            described = ", or ".join(_describe(tiles) for tiles in rung)
            try:
                plan = rest.plan(replace(problem, questions=questions))
            except OutOfReachError as missed:
                rest.say(f"{described}: no plan fits")
                orders += missed.orders
                continue
            rest.say(f"{described}: {outcome(plan)}")
            return plan
        raise BudgetMissedError(explain=lambda: _explain(problem, question, orders))


def _describe(tiles: Tiles) -> str:
    return ", ".join(f"{decision.value} in {decision.num_tiles} tiles" for decision in tiles) or "nothing tiled"


def _explain(problem: Problem, question: Question, orders: Sequence[Prefixes]) -> BudgetMissedError:
    with watch_progress("looking for the least possible", show=problem.target.verbose):
        ((num_bytes, plan),) = least(orders)
        predicted = problem.rehearsal.predict(plan)
    return BudgetMissedError(_describe_least(question, predicted), num_bytes)


def _describe_least(question: Question, least: Prediction) -> str:
    live = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.peak_live.items())
    inputs = map(tensor, question.step.placeholders(Role.INPUT))
    most_samples = max((each.shape[0] for each in inputs if each.ndim), default=0)
    hints = ["a smaller micro-batch (accumulate=)"] if most_samples > 1 else ["a smaller sample"]
    if not question.recompute:
        hints.append("recompute='auto'")
    if not question.tiers:
        hints.append("offload='host' or 'nvme'")
    if not question.tile and not question.step.is_ahead:
        hints.append("tile='auto'")
    if question.layout.num_stage_ranks > 1 and question.stage < 3:
        hints.append("stage=3")
    if question.undecided.precision is None:
        hints.append("precision='bf16'")
    if question.layout.num_stage_ranks == 1:
        hints.append("more ranks at stage 3")
    return (
        f"memory_budget={format_bytes(question.undecided.memory_budget or 0)} cannot be met: the least possible is "
        f"{format_bytes(least.peak_bytes['device'])} ({least.peak_bytes['device']} bytes), at {least.peak_node}, where "
        f"these are live: {live}. To lower it: {', or '.join(hints)}"
    )
