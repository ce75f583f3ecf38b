"""Plans without a budget, for which nothing is searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofx.scheduler.decide.gradients import place_gradients
from zerofx.scheduler.decide.residency import decide
from zerofx.scheduler.decide.states import decisions_of
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.choice import plan_of
from zerofx.scheduler.search.items import free_items, items_of
from zerofx.scheduler.search.order import order_moves
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search


@dataclass(frozen=True)
class AsAsked:
    """Without a budget: the plan as the options say, or the one that computes again all it can."""

    name: str = "as asked"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        if problem.memory_budget is not None:
            return rest.plan(problem)
        if problem.options.recompute == "full":
            return _least_memory(problem)
        free = _recompute_for_free(problem)
        if free is None or problem.layout.mesh.model == 1 or problem.options.saved:
            return free or _plan_as_asked(problem)
        # What ranks send each other of values may have nothing to overlap with then.
        return min(free, _plan_as_asked(problem), key=lambda plan: problem.rehearsal.simulate(plan)[1].step_seconds)


def _plan_as_asked(problem: Problem) -> Plan:
    facts, gradients = problem.facts(), problem.gradients()
    # Only copies that are to be placed ask how long computation takes.
    placed = (
        place_gradients(gradients, facts.piece_graph, problem.layout, facts.run_seconds, problem.machine)
        if gradients
        else ()
    )
    plan = replace(problem.undecided(), tiles=facts.tiles)
    plan = plan.replace_absences(states=decisions_of(problem.delays()), gradients=placed)
    return decide(facts.tile_graph, problem.layout, plan, problem.options.policy, each=problem.buckets_reduced_each())


def _recompute_for_free(problem: Problem) -> Plan | None:
    """The plan that computes again what costs nothing, keeps the rest in 8 bits if that is asked for, and does all else
    as asked; None if there is no such thing."""
    question = problem.question()
    items = free_items(question) if question.inlines else []
    if not items and not problem.options.saved:
        return None
    return plan_of(question, items, order_moves([item.levels for item in items]))[0]


def _least_memory(problem: Problem) -> Plan:
    """The plan that computes again all it can, and gathers as asked."""
    plans = []
    for question in problem.question().divisions:
        items = [item for item in items_of(question, "recompute") if item.kind == "activations"]
        plan, _ = plan_of(question, items, order_moves([item.levels for item in items]))
        plans.append(plan.with_prediction(problem.rehearsal.predict(plan)))
    return min(plans, key=lambda plan: plan.peak_bytes["device"])
