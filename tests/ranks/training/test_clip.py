"""Clipping by the norm of all gradients: what `clip_grad_norm_` does, at every stage and with every plan."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.budgets import small_machine
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Stack, batches, sgd
from tests.lib.runs.offloads import check_measured, parameters_away, placing, prepare_case
from tests.lib.runs.scaling import train_by_hand
from tests.lib.runs.training import (
    Trained,
    build,
    differences,
    plan_of,
    step_of,
    train_compiled,
    train_plain,
    without_key_biases,
)
from tests.ranks.tiers.test_states import PLACES
from zerofx import Plan, UsageError

pytestmark = pytest.mark.usefixtures("drive")

MOST = 0.5  # what the gradients of all cases are above
FAR = 1e6  # what none is above
ROUNDING = 1e-6  # sums of squares are taken in other orders


def unclipped(trained: Trained) -> Trained:
    return replace(trained, norms=[])


@pytest.mark.days(3)
@pytest.mark.parametrize("name", ["gpt", "stack", "tied", "param groups"])
def test_one_process_clips_as_torch_does(name: str) -> None:
    case = CASES[name]
    expected = train_plain(case, 3, max_grad_norm=MOST)
    found = train_compiled(case, 3, 3, max_grad_norm=MOST)
    assert min(expected.norms) > MOST
    assert not differences(without_key_biases(expected), without_key_biases(found), ROUNDING)


@pytest.mark.days(3)
@pytest.mark.parametrize("name", ["stack", "mixed dtypes", "frozen"])
def test_gradients_below_the_norm_keep_their_bits(name: str) -> None:
    case = CASES[name]
    expected = train_plain(case, 3)
    assert not differences(expected, unclipped(train_compiled(case, 3, 3, max_grad_norm=FAR)))
    assert not differences(expected, unclipped(train_compiled(case, 0, 3, max_grad_norm=math.inf)))


def test_micro_batches_are_clipped_once_together() -> None:
    case = CASES["stack"]
    expected = train_plain(case, 3, 2, MOST)
    found = train_compiled(case, 0, 3, accumulate=2, max_grad_norm=MOST)
    assert not differences(expected, found, ROUNDING)
    far = train_compiled(case, 3, 3, accumulate=2, max_grad_norm=FAR)
    assert not differences(train_plain(case, 3, 2), unclipped(far))


def _clip_by_hand(name: str, max_norm: float, steps: int) -> Trained:
    """bf16 parameters whose gradients are clipped in fp32, where their masters are updated."""
    return train_by_hand(name, steps, max_grad_norm=max_norm, low=torch.bfloat16, scaling={"enabled": False}).trained


def test_gradients_in_bf16_are_clipped_in_fp32() -> None:
    # The first step alone is within rounding: parameters in bf16 turn it into other gradients.
    case, options = CASES["stack"], {"precision": "bf16", "max_grad_norm": MOST}
    assert differences(_clip_by_hand("stack", MOST, 1), train_compiled(case, 3, 1, **options), ROUNDING) == []
    far = train_compiled(case, 3, 3, precision="bf16", max_grad_norm=FAR)
    assert differences(unclipped(_clip_by_hand("stack", FAR, 3)), unclipped(far)) == []
    plan = replace(placing(prepare_case(case, 3, 1, precision="bf16"), "host", "host"), max_grad_norm=MOST)
    kept, moved = (train_compiled(case, 3, 3, plan=one, **options) for one in (None, plan))
    assert not differences(kept, moved)


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_does_what_torch_does(worst: float) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    x[0, 0] = worst
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    step = zerofx.compile(model, sgd(model), backend="eager", max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="the loss is"):
        step(x, y)
    plain(x, y).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    sgd(plain).step()
    assert torch.equal(step.grad_norm.isnan(), expected.isnan())
    for name, value in step.full_state_dict().items():
        assert torch.equal(value.isnan(), plain.state_dict()[name].isnan()), name


class Scaled(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_an_infinite_gradient_makes_the_others_zero() -> None:
    x = torch.ones(40)
    x[3] = math.inf
    plain, model = Scaled(), Scaled()
    step = zerofx.compile(model, sgd(model), backend="eager", max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="the loss is nan"):
        step(x)
    plain(x).backward()
    assert torch.equal(step.grad_norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    sgd(plain).step()
    found = step.full_state_dict()["weight"]
    assert torch.equal(found.isnan(), plain.weight.isnan()) and int(found.isnan().sum()) == 1
    assert int((found == 0).sum()) == 39


def test_the_norm_is_a_tensor_of_its_own_for_each_step() -> None:
    case = CASES["stack"]
    model = build(case)
    step = zerofx.compile(model, case.optimizer(model), backend="eager", max_grad_norm=MOST)
    with pytest.raises(UsageError, match="expected a step to have run, found none yet"):
        _ = step.grad_norm
    norms = []
    for args, kwargs in batches(case, 0, 3):
        step(*args, **kwargs)
        norms.append(step.grad_norm)
    expected = train_plain(case, 3, max_grad_norm=MOST).norms
    assert [norm.shape for norm in norms] == [()] * 3 and not norms[0].requires_grad
    assert torch.stack(norms).tolist() == pytest.approx(torch.stack(expected).tolist(), rel=ROUNDING)
    step.close()
    plain = zerofx.compile(model, case.optimizer(model), backend="eager")
    with pytest.raises(UsageError, match=r"max_grad_norm=math\.inf takes it and clips nothing"):
        _ = plain.grad_norm


# ------------------------------------------------------------------------------------------------ plans


def _step(plan: Plan | None, stage: int, name: str = "gpt", **options: Any) -> tuple[zerofx.Step, tuple[Tensor, ...]]:
    return step_of(name, stage, **{"plan": plan, "max_grad_norm": MOST, **options})


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("tier", "update"), PLACES)
def test_states_elsewhere_are_the_same_to_the_bit_and_take_the_bytes_predicted(tier: str, update: str) -> None:
    case = CASES["gpt"]
    plan = replace(placing(prepare_case(case, 0, 1), tier, update), max_grad_norm=MOST)
    kept = train_compiled(case, 0, 2, max_grad_norm=MOST)
    assert not differences(kept, train_compiled(case, 0, 2, max_grad_norm=MOST, plan=plan))
    step, args = _step(plan, 0)
    check_measured(step.measure(*args), step.plan, sum(given.nbytes for given in args))


@pytest.mark.parametrize("states", [None, ("host", "host")])
def test_parameters_elsewhere_are_the_same_to_the_bit(states: tuple[str, str] | None) -> None:
    case = CASES["gpt"]
    plan = replace(parameters_away(prepare_case(case, 3, 1), "host", states), max_grad_norm=MOST)
    kept = train_compiled(case, 3, 2, max_grad_norm=MOST)
    assert not differences(kept, train_compiled(case, 3, 2, max_grad_norm=MOST, plan=plan))


def test_a_budget_is_met_with_states_that_come_up_one_after_the_other() -> None:
    options: dict[str, Any] = {"machine": small_machine(1e9), "recompute": "none", "max_grad_norm": MOST}
    free, args = _step(None, 3, **options)
    expected = [free(*args) for _ in range(3)]
    budget = int(0.75 * free.plan.peak_bytes["device"])
    step, _ = _step(None, 3, memory_budget=budget, offload="host", **options)
    assert all(torch.equal(step(*args), loss) for loss in expected)
    found = step.measure(*args)
    check_measured(found, step.plan, sum(given.nbytes for given in args))
    assert step.plan.states and found.peak_bytes["device"] <= budget


def test_the_predicted_peak_is_the_measured_one() -> None:
    for options in ({"accumulate": 2, "recompute": "full"}, {"precision": "bf16"}):
        step, args = _step(None, 3, **options)
        measured, predicted = step.measure(*args).peak_bytes["device"], step.plan.peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.01), options


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as Inductor is imported
@pytest.mark.slow
def test_compiled_regions_are_clipped_too() -> None:
    case = CASES["stack"]
    expected = train_plain(case, 3, max_grad_norm=MOST)
    assert not differences(expected, train_compiled(case, 3, 3, max_grad_norm=MOST, backend="inductor"), 1e-5)


def _on_ranks(
    drive: str, name: str, stage: int, places: list[tuple[str, str]], plans: list[dict[str, Any]]
) -> list[str]:
    """What differs from DDP, from stage 0, and from what was predicted, with plans and with states in places."""
    os.environ["ZEROFX_NVME_DIR"] = drive
    case, prepared = CASES[name], prepare_case(CASES[name], stage, 2)
    first = train_compiled(case, 0, 2, max_grad_norm=MOST)
    wrong = differences(train_plain(case, 2, max_grad_norm=MOST), first, ROUNDING)
    placed = {place: replace(placing(prepared, *place), max_grad_norm=MOST) for place in places}
    for options in (*plans, *({"plan": plan} for plan in placed.values())):
        found = train_compiled(case, stage, 2, max_grad_norm=MOST, **options)
        wrong += [f"stage {stage}, {options}: {text}" for text in differences(first, found)]
    for plan in placed.values():
        step, args = _step(plan, stage, name)
        check_measured(step.measure(*args, num_steps=2), step.plan, 4096, share=0.001)
        step.close()
    return wrong


def test_two_ranks_have_the_bits_of_stage_0_at_stage_3_and_take_the_bytes_predicted(drive: object) -> None:
    assert run_ranks(_on_ranks, 2, str(drive), "stack", 3, [("host", "host")], [{}]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_have_the_same_bits_at_all_stages_with_all_plans(drive: object, stage: int) -> None:
    plans: list[dict[str, Any]] = [{}, {"keep_gathered": "all"}, {"prefetch": 0, "recompute": "full"}]
    assert run_ranks(_on_ranks, 2, str(drive), "gpt", stage, PLACES, plans, timeout=1800.0) == [[], []]


def _below_on_ranks() -> list[str]:
    case = CASES["gpt"]
    expected, wrong = train_plain(case, 3), []
    for stage in range(4):
        wrong += differences(expected, unclipped(train_compiled(case, stage, 3, max_grad_norm=FAR)))
    return wrong


@pytest.mark.slow
def test_two_ranks_below_the_norm_have_the_bits_of_ddp_at_all_stages() -> None:
    assert run_ranks(_below_on_ranks, 2, timeout=1800.0) == [[], []]


# ------------------------------------------------------------------------------------------------ planning


planned = partial(plan_of, "stack")


def test_gradients_live_until_the_last_reduction() -> None:
    free, clipped = planned(world_size=2, stage=2), planned(world_size=2, stage=2, max_grad_norm=1.0)
    sizes = [bucket.shard_numel * 4 for bucket in clipped.plan.buckets]
    rows = clipped.schedule().rows
    (clip,) = (row for row in rows if row.name == "clip")
    (behind,) = (row for row in rows if row.name == "grad_norm")
    assert clip.live_bytes >= free.lowered.simulation.live.persistent_bytes + sum(sizes)
    assert behind.position < clip.position


def test_the_simulation_has_updates_behind_the_last_reduction() -> None:
    lowered = planned(world_size=4, max_grad_norm=1.0).lowered
    timings = {node.name: timing for node, timing in lowered.simulation.timings.items()}
    reduced = max(one.start_seconds + one.seconds for name, one in timings.items() if name.startswith("reduce_"))
    known = timings["squares_of_ranks"].start_seconds
    updates = [one.start_seconds for name, one in timings.items() if name.startswith("addcdiv_")]
    assert updates and reduced <= known <= min(updates)
    assert lowered.plan.step_seconds > planned(world_size=4).plan.step_seconds


def test_all_that_is_sent_more_is_a_number_from_each_rank() -> None:
    free, clipped = planned(world_size=4).plan, planned(world_size=4, max_grad_norm=1.0).plan
    assert clipped.wire_bytes - free.wire_bytes == 8 * 3


def test_a_wire_of_few_bits_is_planned_beside_it() -> None:
    clipped = planned(world_size=16, wire="int8", max_grad_norm=1.0).plan
    assert clipped.max_grad_norm == 1.0 and len(clipped.wires) == len(clipped.buckets)


def test_a_plan_says_what_it_clips_to_and_is_for_nothing_else() -> None:
    free, plan = planned().plan, planned(max_grad_norm=0.5).plan
    assert "gradients clipped to a norm of 0.5" in str(plan) and "clipped" not in str(free)
    assert free.diff(plan).startswith("made for\n  max_grad_norm: None -> 0.5")
    assert Plan.from_json(plan.to_json()) == plan and "max_grad_norm" not in free.to_json()
    case = CASES["stack"]
    model = build(case)
    with pytest.raises(zerofx.PlanError, match=r"max_grad_norm: expected 0\.5, found 1\.0"):
        zerofx.compile(model, case.optimizer(model), plan=plan, machine="cpu", backend="eager", max_grad_norm=1.0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, True, "1.0", torch.tensor(1.0)])
def test_what_is_no_norm_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected max_grad_norm to be a number above 0"):
        planned(max_grad_norm=wrong)
