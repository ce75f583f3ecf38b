"""Plans within a budget for host memory too.

The search (``scheduler.search.budget``) puts on the host what its room there allows by estimate: states, parameters
that are updated with them, activations, and copies on their way to and from nvme. What a plan takes of the host's pool
is then counted whole, position by position, in blocks as the pool hands them out; where that is more than the budget,
the plan is made again with as much less room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError
from zerofx.scheduler.search.graph_facts import Captured
from zerofx.scheduler.search.problem import Question
from zerofx.units import format_bytes

_ROUNDS = 4  # plans to make with less and less room, before the last one leaves the host alone


def fit_host(
    question: Question,
    host_budget: int | None,
    fit: Callable[[Question], Plan],
    host_bytes: Callable[[Plan], int],
) -> Plan:
    """The fastest plan within the budgets of device and host, as far as it is found.

    Args:
        question: graph, machine and budget for the device.
        host_budget: bytes of the host's pool on one rank; None for the rank's share of the machine's.
        fit: the fastest plan for a question (``scheduler.search.budget.fit``).
        host_bytes: what a plan takes of the host's pool at the most.

    Raises:
        BudgetMissedError: no plan fits the device's budget, or none does with as much host memory; says how much would
            do.
    """
    if host_budget is None or not question.tiers:
        return fit(question)
    room = host_budget
    for number in range(_ROUNDS + 1):
        try:
            captured = Captured(question.step, with_host_bytes(question.machine, room))
            plan = fit(dataclasses.replace(question, captured=captured))
        except BudgetMissedError as error:
            raise _explain(question, host_budget, error, fit, host_bytes) from error
        over = host_bytes(plan) - host_budget
        if over <= 0:
            return plan
        room = max(room - over, 0) if number < _ROUNDS - 1 else 0
    raise AssertionError("a plan without room on the host takes none of it")


def with_host_bytes(machine: Machine, num_bytes: int) -> Machine:
    """``machine`` with ``num_bytes`` of host memory for each rank, where it has more."""
    most = max(num_bytes, 1) * machine.ranks_per_node
    return dataclasses.replace(
        machine, host=dataclasses.replace(machine.host, memory_bytes=min(machine.host.memory_bytes, most))
    )


def _explain(
    question: Question,
    host_budget: int,
    error: BudgetMissedError,
    fit: Callable[[Question], Plan],
    host_bytes: Callable[[Plan], int],
) -> BudgetMissedError:
    """What to say where the device's budget is missed with so little host memory; that of a device that is too small
    in any case says it all."""
    try:
        enough = host_bytes(fit(question))
    except BudgetMissedError as anyway:
        return anyway
    budget = question.memory_budget
    assert budget is not None, "what has no budget for the device is not searched"
    return BudgetMissedError(
        f"memory_budget={format_bytes(budget)} cannot be met within host_budget={format_bytes(host_budget)}: the least "
        f"possible with that is {format_bytes(error.least_bytes)} ({error.least_bytes} bytes) on the device, while a "
        f"plan that fits it takes {format_bytes(enough)} ({enough} bytes) of host memory. Raise host_budget, or "
        f"memory_budget",
        error.least_bytes,
    )
