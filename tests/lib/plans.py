"""Captured steps with plans that are changed by hand: states elsewhere, merged gathers, few bits on the wire."""

from __future__ import annotations

from dataclasses import replace

from tests.lib.graphs import Prepared, TwoBlocks, adagrad, prepare
from tests.lib.lowered import Deep
from tests.lib.runs.offloads import placing
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.scheduler.plan.decisions import WireDecision
from zerofx.scheduler.plan.plan import Plan


def placed(tier: str, update: str, stage: int = 3, num_ranks: int = 2, precision: str | None = None) -> Prepared:
    model = TwoBlocks()
    prepared = prepare(model, optimizer=adagrad(model), stage=stage, num_ranks=num_ranks, precision=precision)
    prepared.plan = placing(prepared, tier, update)
    return prepared


def delaying(stage: int, num_ranks: int = 2, precision: str | None = None) -> Prepared:
    prepared = placed("host", "host", stage, num_ranks, precision)
    states = tuple(replace(decision, delayed=True) for decision in prepared.plan.states)
    prepared.plan = prepared.plan.replace_absences(states=states)
    return prepared


def merging(plan: Plan, *numbers: int) -> Plan:
    """``plan`` with these gathers started as one with those before them."""
    gathers = list(plan.gathers)
    for number in sorted(numbers):
        gathers[number] = replace(gathers[number], merged=True, issue=gathers[number - 1].issue)
    return replace(plan, gathers=tuple(gathers))


def merged(*numbers: int, prefetch: int = 1) -> Prepared:
    prepared = prepare(Deep(3), num_ranks=2, prefetch=prefetch)
    prepared.plan = merging(prepared.plan, *numbers)
    return prepared


def wired(gather: str = "int8", second_shard: bool = True, buckets: tuple[int, ...] = (0, 1, 2), **kwargs: object) -> (
    Prepared
):  # fmt: skip
    """A step on two nodes of two ranks each whose buckets are gathered so, as far as they are gathered twice."""
    given = prepare(**{"num_ranks": 4, "block": BLOCK, **kwargs})  # type: ignore[arg-type]  # of ``prepare``
    times = [decision.bucket for decision in given.plan.gathers]
    wires = tuple(
        WireDecision(index, gather, second_shard and times.count(index) > 1, "exact", "a test") for index in buckets
    )
    given.plan = replace(given.plan, wire="int8" if gather == "exact" else gather, ranks_per_node=2, wires=wires)
    return given
