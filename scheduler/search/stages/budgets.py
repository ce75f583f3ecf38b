"""Plans within a budget in later steps too, and within one for host memory.

On the host, the search puts what its room there allows by estimate: states, parameters that are updated with them,
activations, and copies on their way to and from nvme. What a plan takes of the host's pool is then counted whole,
position by position, in blocks as the pool hands them out; where that is more than the budget, the plan is made again
with the host's room reduced by the excess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from zerofx.budgets import host_budget_bytes, tiers_for
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem, needs_most
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes

_ROUNDS = 4  # plans to make with less and less room, before the last one leaves the host alone


@dataclass(frozen=True)
class HostBudget:
    """The fastest plan within the budgets of device and host, as far as it is found.

    Without a host budget it is a rank's share of the machine's host memory, counted without what blocks round up, and
    where no plan is found within that, the one that its estimate leads to.
    """

    name: str = "host budget"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        machine = problem.machine
        asked = host_budget_bytes(problem.options.host_budget, machine)
        if not tiers_for(problem.options.offload, machine):
            return rest.plan(problem)
        host_bytes = budget = machine.host_bytes_per_rank if asked is None else asked
        first: Plan | None = None
        for number in range(_ROUNDS + 1):
            narrowed = replace(problem, machine=limit_host_bytes(machine, host_bytes))
            try:
                plan = rest.attempt(f"{format_bytes(host_bytes)} by estimate", narrowed)
            except BudgetMissedError as refusal:
                if asked is not None:
                    explain = partial(self._explain, problem, budget, refusal, rest)
                    raise BudgetMissedError(explain=explain) from refusal
                if first is None:
                    raise
                return first
            first = first or plan
            taken = plan.peak_bytes.get("host", 0) if asked is None else problem.rehearsal.host_block_bytes(plan)
            if taken <= budget:
                return plan
            rest.say(f"takes {format_bytes(taken)} of {format_bytes(budget)}{'' if asked is None else ' in blocks'}")
            host_bytes = max(host_bytes - (taken - budget), 0) if number < _ROUNDS - 1 else 0
        if asked is None:
            assert first is not None, "each round has a plan, or is the last"
            return first
        raise MemoryBudgetError(
            f"host_budget={format_bytes(budget)} cannot be met: what has to be on the host, where delayed_update or "
            f"the training step has its states, takes {format_bytes(taken)} ({taken} bytes). Raise host_budget"
        )

    def _explain(self, problem: Problem, budget: int, refusal: BudgetMissedError, rest: Search) -> BudgetMissedError:
        """The error to raise where the device's budget is missed with so little host memory; that of a device that is
        too small in any case says it all."""
        try:
            enough = problem.rehearsal.host_block_bytes(rest.attempt("all of the host", problem))
        except BudgetMissedError as anyway:
            return anyway
        assert problem.memory_budget is not None, "what has no budget for the device is not searched"
        return BudgetMissedError(
            f"memory_budget={format_bytes(problem.memory_budget)} cannot be met within "
            f"host_budget={format_bytes(budget)}: the least possible with that is "
            f"{format_bytes(refusal.least_bytes)} ({refusal.least_bytes} bytes) on the device, while a plan that fits "
            f"it takes {format_bytes(enough)} ({enough} bytes) of host memory. Raise host_budget, or memory_budget",
            refusal.least_bytes,
        )


def limit_host_bytes(machine: Machine, num_bytes: int) -> Machine:
    """``machine`` with ``num_bytes`` of host memory for each rank, where it has more."""
    most = max(num_bytes, 1) * machine.ranks_per_node
    return replace(machine, host=replace(machine.host, memory_bytes=min(machine.host.memory_bytes, most)))


@dataclass(frozen=True)
class LaterUpdates:
    """A plan that keeps all updates within the budget, or else the coming step's: each has a plan that does.

    What an update takes differs from step to step for some optimizers: SGD with momentum copies the first gradients,
    and adds later ones to what it has then. A step is planned again where its update changes, which must not be refused
    for a budget that the first step was allowed: so later updates are planned for before the first step.

    Where one of the updates has no plan within the budget, that of the most bytes is refused.
    """

    name: str = "later updates"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        updates = [problem.replace_updates(programs) for programs in problem.variants.updates]
        plans: list[Plan] = []
        refusals: list[BudgetMissedError] = []
        for number, planned in enumerate(updates):
            described = "the coming step's" if number == 0 else f"a later step's ({number} of {len(updates) - 1})"
            try:
                plan = rest.attempt(described, planned)
            except BudgetMissedError as refusal:
                refusals.append(refusal)
                continue
            if all(_is_within(plan, other) for other in updates if other is not planned):
                return plan
            rest.say("the plan does not fit with another step's update")
            plans.append(plan)
        if refusals:
            raise needs_most(refusals)
        return plans[0]


def _is_within(plan: Plan, problem: Problem) -> bool:
    budget = problem.memory_budget
    return budget is None or problem.rehearsal.predict(plan).peak_bytes["device"] <= budget
