"""Stages that take micro-batches by turns: the order, what the loop stands for, and what its rounds hand on."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from tests.plan.decide.test_stages import Skipping, planned
from zerofx.ir import ops
from zerofx.ir.facts import twin_of
from zerofx.ir.graph import StepGraph, num_bodies
from zerofx.ir.micro_batches import loops_of, micro_batches_of, times_run, turns


@pytest.mark.parametrize(("lags", "num"), [((0,), 3), ((0, 1), 1), ((0, 3, 4, 6), 9), ((0, 2, 3), 2)])
def test_each_stretch_runs_all_micro_batches_in_order_once(lags: tuple[int, ...], num: int) -> None:
    order = list(itertools.chain.from_iterable(turns(lags, num)))
    assert sorted(order) == [(stretch, batch) for stretch in range(len(lags)) for batch in range(num)]
    for stretch, lag in enumerate(lags):
        assert [batch for number, batch in order if number == stretch] == list(range(num))
        if stretch:  # no later than its lag says, and no earlier
            begins = order.index((stretch, 0))
            assert max(batch for number, batch in order[:begins] if number == 0) == min(lag, num - 1)


@pytest.mark.parametrize(("num", "num_before"), [*itertools.product((1, 2, 3, 4, 5, 11), (1, 2, 4))])
def test_bodies_stand_for_all_micro_batches(num: int, num_before: int) -> None:
    batches = [micro_batches_of(body, num, num_before) for body in range(num_bodies(num, num_before))]
    assert list(itertools.chain(*batches)) == list(range(num))
    assert [len(of_body) > 1 for of_body in batches].count(True) == (num > num_before + 2)


def _stages(num: int) -> list[StepGraph]:
    stages = planned(Skipping(), (torch.ones(num, 8),), 3, accumulate=num, order="micro-batch").stages
    return [stage.lowered.graph for stage in stages]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 6, 9])
def test_all_that_a_micro_batch_runs_is_run_as_often_as_there_are_some(num: int) -> None:
    for stage in _stages(num):
        times = times_run(stage)
        for target in (ops.send_value, ops.receive_value, ops.wait):
            assert sum(many for node, many in times.items() if node.target is target) % num == 0
        assert len(loops_of(stage)) == (num > stage.num_bodies)


@pytest.mark.parametrize(("number", "num_before", "under_way"), [(0, 3, 2), (1, 2, 1), (2, 2, 2)])
def test_rounds_hand_on_what_is_under_way(number: int, num_before: int, under_way: int) -> None:
    stage = _stages(9)[number]
    (loop,) = loops_of(stage)
    assert stage.num_before == num_before and loop.num_rounds == 9 - num_before - 1
    counts = Counter[str]()
    for before, after in loop.carries:
        mine, following = twin_of(before), twin_of(after)
        if mine is not None and following is not None:
            assert following == (mine[0], mine[1] + 1)
            counts[mine[0]] += 1
    # Of the last stage it is what is sent to the first, for which it waits two turns later.
    assert max(counts.values()) == under_way
