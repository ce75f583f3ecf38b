"""Gradients that wait for the next micro-batch in a slower tier: the same bits, and the bytes that were predicted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import zerofx
from tests.lib.budgets import small_machine
from tests.lib.distributed import run_ranks
from tests.lib.graphs import Prepared, prepare
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import check_measured, prepare_case
from tests.lib.runs.training import build, differences, step_of, train_compiled, train_plain
from zerofx.ir import ops
from zerofx.passes.verify import verify
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import seconds_by_place
from zerofx.scheduler.decide.gradients import place_gradients
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("drive", "verified")


def waiting(prepared: Prepared, tier: str, machine: Machine | None = None, every: int = 1) -> Plan:
    """The plan of ``prepared`` with the gradients of every so many buckets in ``tier`` between micro-batches."""
    machine = machine or Machine.named("cpu")
    decisions = [
        Absence(
            kind="gradients",
            bucket=d.bucket,
            tier=cast(Tier, tier),
            num_bytes=prepared.layout.buckets[d.bucket].full_bytes,
            free_after=(),
            reload_before=(),
            reason="by hand",
        )
        for d in prepared.plan.reduces[::every]
    ]
    seconds = seconds_by_place(prepared.step, machine)
    placed = place_gradients(decisions, prepared.step, prepared.layout, seconds, machine)
    return prepared.plan.replace_absences(gradients=placed)


def test_gradients_wait_between_micro_batches(golden: Callable[..., None]) -> None:
    prepared = prepare(stage=2, num_micro_batches=3)
    prepared.plan = waiting(prepared, "host", every=3)
    golden(prepared.changes("gradients"))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
@pytest.mark.parametrize("precision", [None, "fp16"])  # of which the latter is divided before it is reduced, too
def test_what_reduces_a_buffer_where_it_lies_is_no_gradient_of_a_micro_batch(stage: int, precision: str | None) -> None:
    prepared = _prepared(2, 4, stage, num_ranks=2, precision=precision)
    prepared.plan = waiting(prepared, "host")
    prepared.run("gradients")
    verify(prepared.step, "gradients")
    reloads = {node for node in prepared.step.calls() if node.target is ops.reload}
    assert len(reloads) == len(prepared.plan.reduces)
    assert reloads == {_pending_of(node.args[0]) for node in prepared.step.calls() if node.target in ops.REDUCTIONS}


def _pending_of(waited: Any) -> Any:
    assert waited.target is ops.wait
    return waited.args[0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "accumulate", "every"), [("host", 2, 1), ("nvme", 2, 2)])
def test_training_is_the_same_to_the_bit(tier: str, accumulate: int, every: int) -> None:
    case = CASES["gpt"]
    plan = waiting(prepare_case(case, 0, 1, accumulate), tier, every=every)
    found = train_compiled(case, 0, 3, plan=plan, accumulate=accumulate)
    assert not differences(train_plain(case, 3, accumulate), found)


def _batch(rows: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    ((args, _),) = batches(CASES["gpt"], 0, 1)
    return tuple(torch.cat([given] * (rows // given.shape[0])) for given in args)


def _step(plan: Plan | None, stage: int = 0, **options: Any) -> zerofx.Step:
    return step_of("gpt", stage, plan=plan, **options)[0]


def _prepared(
    num_micro_batches: int, rows: int, stage: int = 0, num_ranks: int = 1, precision: str | None = None
) -> Prepared:
    case = CASES["gpt"]
    model = build(case)
    args = tuple(given.chunk(num_micro_batches)[0] for given in _batch(rows))
    return prepare(
        model, args, stage=stage, num_ranks=num_ranks, optimizer=case.optimizer(model),
        num_micro_batches=num_micro_batches, precision=precision,
    )  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_bytes_are_those_predicted(tier: str) -> None:
    prepared, args = _prepared(4, 8), _batch(8)
    step, kept = _step(waiting(prepared, tier), accumulate=4), _step(None, accumulate=4)
    found, without = step.measure(*args), kept.measure(*args)
    check_measured(found, step.plan, sum(given.nbytes for given in args))
    full = sum(bucket.full_bytes for bucket in prepared.layout.buckets)
    assert found.link_bytes["to_host"] == found.link_bytes["to_device"] == 3 * full
    saved = without.peak_bytes["device"] - found.peak_bytes["device"]
    # Copies take the time that there is: of so small a model, a drive's take all of it.
    assert saved > 0 if tier == "host" else saved == 0
    assert step.tiers() == kept.tiers() == {"device": 3 * full}
    assert all(torch.equal(one, kept.full_state_dict()[name]) for name, one in step.full_state_dict().items())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_by_name_all_gradients_wait_with_the_bits_and_bytes_of_the_plan(tier: str) -> None:
    args = _batch(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = _step(None, accumulate=2, offload={"gradients": tier}, host_budget="1GiB")
    kept = _step(None, accumulate=2)
    assert all(torch.equal(step(*args), kept(*args)) for _ in range(2))
    found, plan = step.measure(*args), step.plan
    check_measured(found, plan, sum(given.nbytes for given in args))
    full = sum(bucket.shard_numel * 4 for bucket in plan.buckets)
    assert found.link_bytes["to_host"] == found.link_bytes["to_device"] == full
    assert {decision.tier for decision in plan.gradients} == {tier} and not plan.states
    assert "as asked: frees" in str(plan)


def test_gradients_of_slices_wait_with_the_bits_of_those_that_stay() -> None:
    """Each slice is a bucket, and no run of a unit lies between the gradients of one and of the next."""
    options: dict[str, Any] = {"accumulate": 3, "reduce": "once", "tile": {"layers.0.mlp.up.weight": 4}}
    step, kept, args = _step(None, offload={"gradients": "host"}, **options), _step(None, **options), _batch(6)
    assert all(torch.equal(step(*args), kept(*args)) for _ in range(2))
    found, plan = step.measure(*args), step.plan
    check_measured(found, plan, sum(given.nbytes for given in args))
    assert len(plan.gradients) == len(plan.buckets) and plan.slices


def test_by_name_beside_a_budget_they_wait_too_and_nothing_else_leaves() -> None:
    args = _batch(4)
    options: dict[str, Any] = {"accumulate": 2, "machine": "cpu", "offload": {"gradients": "host"}}
    free = _step(None, **options)
    expected = free(*args)
    step = _step(None, memory_budget=int(0.9 * free.plan.peak_bytes["device"]), **options)
    assert torch.equal(step(*args), expected)
    plan = step.plan
    assert len(plan.gradients) == len(plan.reduces) and not (plan.offloads or plan.states or plan.parameters)
    full = _step(None, recompute="full", **options)
    full.prepare(*args)
    assert len(full.plan.gradients) == len(plan.reduces) and full.plan.recomputes


@pytest.mark.parametrize("accumulate", [1, "auto"])
def test_with_one_micro_batch_there_is_nothing_to_move(accumulate: Any) -> None:
    with pytest.warns(zerofx.ZeroFXWarning, match=r"is ignored with accumulate=.*, which is one micro-batch"):
        step = _step(None, accumulate=accumulate, offload={"gradients": "host"})
    step.prepare(*_batch(2))
    assert not step.plan.gradients


@pytest.mark.parametrize("wrong", [{}, {"gradients": "device"}, {"activations": "host"}, ["host"], "tape"])
def test_what_cannot_be_offloaded_by_name_is_refused(wrong: Any) -> None:
    with pytest.raises(zerofx.UsageError, match=r"or {'gradients': 'host'}"):
        _step(None, accumulate=2, offload=wrong)


def test_a_given_plan_has_gradients_where_they_are_asked_to_be() -> None:
    plan = waiting(_prepared(2, 4), "nvme")
    with pytest.raises(
        zerofx.UsageError,
        match=r"a plan that has gradients wait on nvme between micro-batches, found offload={.gradients.: .host.}",
    ):
        _step(plan, accumulate=2, offload={"gradients": "host"}, machine="cpu")
    _step(plan, accumulate=2, offload={"gradients": "nvme"}, machine="cpu").close()


def _on_ranks(stage: int) -> list[str]:
    plan, args = waiting(_prepared(2, 4, stage, 2), "host"), _batch(4)
    step, kept = _step(plan, stage, accumulate=2), _step(None, stage, accumulate=2)
    check_measured(step.measure(*args, num_steps=2), step.plan, 4096, share=0.001)
    wrong = [] if torch.equal(step(*args), [kept(*args) for _ in range(3)][-1]) else ["loss"]
    expected = kept.full_state_dict()
    return wrong + [name for name, one in step.full_state_dict().items() if not torch.equal(one, expected[name])]


def test_two_ranks() -> None:
    assert run_ranks(_on_ranks, 2, 3) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(3))
def test_other_stages_on_two_ranks(stage: int) -> None:
    assert run_ranks(_on_ranks, 2, stage) == [[], []]


def test_a_budget_sends_gradients_away() -> None:
    args = _batch(8)
    options: dict[str, Any] = {"accumulate": 4, "machine": small_machine(1e9), "recompute": "none"}
    free = _step(None, **options)
    expected = [free(*args) for _ in range(2)]
    budget = int(0.55 * free.plan.peak_bytes["device"])
    step = _step(None, memory_budget=budget, offload="host", **options)
    assert [float(step(*args)) for _ in range(2)] == [float(loss) for loss in expected]
    assert step.plan.gradients and step.plan.peak_bytes["device"] <= budget
    assert Plan.from_json(step.plan.to_json()) == step.plan
    assert "between micro-batches" in str(step.plan) and "between micro-batches" in free.plan.diff(step.plan)
    name = step.plan.buckets[step.plan.gradients[0].bucket].name
    assert "gradients on host between micro-batches: frees" in step.plan.why(name)


def test_on_a_slow_link_a_copy_has_more_runs() -> None:
    prepared = _prepared(2, 4)
    order = prepared.step.positions()
    spread = []
    for rate in (1e12, 1e6):
        plan = waiting(prepared, "host", small_machine(rate))
        spread.append([order[prepared.node(d.reload_before[0])] for d in plan.gradients])
    assert all(slow <= fast for fast, slow in zip(*spread, strict=True)) and spread[0] != spread[1]


@pytest.mark.parametrize("wrong", [{"tier": "device"}, {"tier": "tape"}, {"bucket": 99}, {"free_after": ()}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    prepared = prepare(stage=0, num_ranks=1, num_micro_batches=2)
    plan = waiting(prepared, "host")
    prepared.plan = plan.replace_absences(gradients=(replace(plan.gradients[0], **wrong), *plan.gradients[1:]))
    with pytest.raises(zerofx.PlanError, match=r"gradients of a trained bucket .*host or nvme"):
        prepared.run()
