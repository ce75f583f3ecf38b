"""Gradients of a scaled loss are looked at, all of them, and freed of the scale in front of their updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.lib.graphs import Prepared, TwoBlocks, adagrad, calls, prepare
from tests.lib.runs.offloads import placing
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, argument_value, origin
from zerofx.ir.streams import runs_on_host
from zerofx.passes.lib.reduced_gradients import divisors
from zerofx.passes.verify import verify

aten = torch.ops.aten


def scaled(stage: int = 3, num_ranks: int = 2, precision: str | None = "fp16", clip: float | None = None) -> Prepared:
    model = TwoBlocks()
    prepared = prepare(
        model, optimizer=adagrad(model), stage=stage, num_ranks=num_ranks, precision=precision, loss_scaled=True
    )
    prepared.plan = replace(prepared.plan, max_grad_norm=clip)
    return prepared


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (3, 2), (3, 1)])
def test_the_largest_gradient_is_found_in_slices(golden: Callable[..., None], stage: int, num_ranks: int) -> None:
    golden(scaled(stage, num_ranks).changes("unscale"))


def test_a_norm_of_float16_is_all_that_is_read_and_is_unscaled(golden: Callable[..., None]) -> None:
    prepared = scaled(clip=1.0)
    golden(prepared.changes("clip"))
    assert not calls(prepared.step, ops.largest)
    wide = scaled(precision=None, clip=1.0).run()
    assert len(calls(wide.step, ops.largest)) == len(calls(wide.step, ops.square_sum)) == 3


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_step_ends_there_with_all_that_it_gives(golden: Callable[..., None], clip: float | None) -> None:
    golden(scaled(clip=clip).changes("check_gradients"))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_updates_begin_with_the_inverse_of_the_scale(golden: Callable[..., None], clip: float | None) -> None:
    golden(scaled(2, clip=clip).changes("update"))


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (2, "fp16"), (3, "fp16")])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("tier", "update"), [("host", "host"), ("nvme", "device")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_the_passes_leave_is_accepted(
    tier: str, update: str, num_ranks: int, stage: int, precision: str | None, clip: float | None
) -> None:
    prepared = scaled(stage, num_ranks, precision, clip)
    prepared.plan = placing(prepared, tier, update)
    prepared.run_pipeline()
    step, order = prepared.step, prepared.step.positions()
    (check,) = calls(step, ops.check_gradients)
    inverse = prepared.node("inverse_scale")
    read = [inverse, *(node for node in step.calls() if node.name == "inverse_scale_down")]
    freed = [node for node in calls(step, aten.mul_.Tensor) if node.args[1] in read]
    assert len(freed) == len(prepared.plan.reduces)
    assert {runs_on_host(node) for node in freed} == {update == "host"}
    assert all(order[check] < order[node] for node in freed)
    assert all(argument_value(node, 0).dtype is torch.float32 for node in freed)
    backward = [node for node in step.calls() if origin(node).phase is Phase.BACKWARD]
    assert max(map(order.__getitem__, backward)) < order[check]


def test_an_update_before_the_check_is_refused() -> None:
    prepared = scaled().run()
    verify(prepared.step, "all", prepared.plan)
    written = calls(prepared.step, aten.copy_.default)[-1]
    written.append(calls(prepared.step, ops.check_gradients)[0])
    with pytest.raises(InvalidGraphError, match=r"scaling: \w+ writes \w+ before gradients are known to be finite"):
        verify(prepared.step, "mine")


def test_a_step_that_checks_gradients_is_refused_for_a_plan_that_does_not() -> None:
    prepared = scaled().run()
    with pytest.raises(InvalidGraphError, match="plan: the graph checks gradients"):
        verify(prepared.step, "all", replace(prepared.plan, loss_scaled=False))


def test_a_plan_that_scales_is_refused_for_a_graph_that_does_not() -> None:
    prepared = prepare()
    prepared.plan = replace(prepared.plan, loss_scaled=True)
    with pytest.raises(PlanError, match="expected a graph whose loss is scaled"):
        prepared.run()


def test_delayed_updates_are_refused() -> None:
    prepared = scaled()
    states = tuple(replace(decision, delayed=True) for decision in placing(prepared, "host", "host").states)
    prepared.plan = prepared.plan.replace_absences(states=states)
    with pytest.raises(PlanError, match="expected no delayed updates together with loss scaling"):
        prepared.run()


def test_float16_is_divided_on_both_sides_of_a_sum_over_ranks() -> None:
    assert [divisors(torch.float16, ranks) for ranks in (1, 2, 3, 4, 8, 64, 1024)] == [
        (1, 1), (2, 1), (2, 1.5), (2, 2), (4, 2), (8, 8), (32, 32),
    ]  # fmt: skip
    assert divisors(torch.bfloat16, 4) == (1, 4)
    step = prepare(precision="fp16", num_ranks=4).run().step
    divided = calls(step, aten.div_.Tensor)
    whole = {node.args[0] for node in calls(step, ops.reduce_scatter)}
    assert [node.args[1] for node in divided] == [2] * 6
    assert sum(node.args[0] in whole for node in divided) == 3
