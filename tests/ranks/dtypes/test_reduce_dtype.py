"""Gradients that are reduced in another dtype than they are computed in: the bits of FSDP2 with the same policy."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import check_measured, placing, prepare_case
from tests.lib.runs.scaling import QUICK, train_scaled
from tests.lib.runs.training import Trained, build, differences, parts, step_of, train_compiled, train_plain, world
from tests.ranks.tiers.test_gradients import waiting
from zerofx import PlanError, Precision, UsageError
from zerofx.precision import dtype_of

pytestmark = pytest.mark.usefixtures("drive", "verified")

# What is computed in, and what is reduced in.
POLICIES: list[tuple[Any, Any]] = [("bf16", "fp32"), (None, "bf16")]
# Micro-batches, and whether each one's gradients are reduced.
MICRO_BATCHES = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def _fsdp2(name: str, steps: int, policy: tuple[Any, Any], accumulate: int, *, each: bool) -> Trained:
    """Eager training of a case under FSDP2, with masters in float32."""
    case = CASES[name]
    model = build(case)
    compute, reduce = (None if word is None else dtype_of(word) for word in policy)
    sharded = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))
    optimizer = case.optimizer(model)
    losses = []
    for args, kwargs in batches(case, world()[0], steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, (part, keywords) in enumerate(parts(args, kwargs, accumulate)):
            sharded.set_requires_gradient_sync(each or number == accumulate - 1)
            loss = case.loss(model(*part, **keywords)) / accumulate
            loss.backward()
            total = loss.detach() if number == 0 else total + loss.detach()
        optimizer.step()
        losses.append(total)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return Trained(losses, whole)


def _compare(
    name: str, stages: list[int], policies: list[tuple[Any, Any]], micro_batches: list[tuple[int, bool]]
) -> dict[str, list[str]]:
    wrong = {}
    for policy, (accumulate, each) in itertools.product(policies, micro_batches):
        options = {"accumulate": accumulate, "reduce": "each" if each else "once"}
        reduced = Precision(policy[0], reduce_dtype=policy[1])
        expected = _fsdp2(name, 3, policy, accumulate, each=each)
        for stage in stages if not each else [stage for stage in stages if stage]:
            found = train_compiled(CASES[name], stage, 3, precision=reduced, **options)
            wrong[f"{policy} {accumulate} {each} at {stage}"] = differences(expected, found)
        rounds = policy[1] == "bf16" or accumulate > 1 or world()[1] > 1
        if rounds and not differences(expected, train_compiled(CASES[name], 3, 3, precision=policy[0], **options)):
            wrong[f"{policy} {accumulate} {each}"] = ["nothing differs without it"]
    return {label: differ for label, differ in wrong.items() if differ}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_train_as_fsdp2(policy: tuple[Any, Any]) -> None:
    assert run_ranks(_compare, 2, "stack", [2], [policy], [(2, False)]) == [{}, {}]


@pytest.mark.slow
def test_all_stages_train_as_fsdp2() -> None:
    stages = [0, 1, 2, 3]
    assert run_ranks(_compare, 2, "gpt", stages, POLICIES, MICRO_BATCHES[:3]) == [{}] * 2
    assert run_ranks(_compare, 2, "stack", stages, POLICIES, MICRO_BATCHES) == [{}] * 2
    # One rank has nothing to reduce by micro-batch. gloo adds up three ranks' numbers in an order of its own, in which
    # bf16 is rounded otherwise.
    assert run_ranks(_compare, 1, "stack", stages, POLICIES, [m for m in MICRO_BATCHES if not m[1]]) == [{}]
    assert run_ranks(_compare, 3, "stack", stages, POLICIES[:1], MICRO_BATCHES) == [{}] * 3


def _compare_ways() -> dict[str, list[str]]:
    """Ways to train that have the same bits as others."""
    wrong: dict[str, list[str]] = {}
    case, common = CASES["stack"], {"precision": Precision("bf16", reduce_dtype="fp32")}
    expected = train_compiled(case, 3, 3, accumulate=4, reduce="once", **common)
    for tier in ("host", "nvme"):
        prepared = prepare_case(case, 3, 2, 4, "bf16", reduce_dtype=torch.float32)
        found = train_compiled(case, 3, 3, accumulate=4, plan=waiting(prepared, tier), **common)
        wrong[f"gradients on {tier}"] = differences(expected, found)
    expected = train_compiled(case, 1, 3, **common)
    for places in (("host", "host"), ("nvme", "device")):
        prepared = prepare_case(case, 1, 2, precision="bf16", reduce_dtype=torch.float32)
        found = train_compiled(case, 1, 3, plan=placing(prepared, *places), **common)
        wrong[f"states {places}"] = differences(expected, found)
    first = train_compiled(case, 0, 4, delayed_update=1, **common)
    wrong["delayed"] = differences(first, train_compiled(case, 3, 4, delayed_update=1, **common))
    first = train_compiled(case, 3, 4, delayed_update=9, **common)
    wrong["not yet delayed"] = differences(train_compiled(case, 3, 4, **common), first)
    # A norm above all others: float32 is clipped as it is, whatever it was computed in.
    clipped = train_compiled(case, 2, 3, max_grad_norm=1e6, **common)
    wrong["clipped"] = differences(expected, Trained(clipped.losses, clipped.state))
    kept = {"precision": Precision("bf16", (nn.LayerNorm,), "fp32")}
    wrong["kept"] = differences(train_compiled(case, 0, 3, **kept), train_compiled(case, 3, 3, **kept))
    step, args = step_of("stack", 3, **common)
    check_measured(step.measure(*args, num_steps=2), step.plan, 4096, share=0.01)
    plain, _ = step_of("stack", 3, precision="bf16")
    plain(*args)
    more = step.plan.wire_bytes - plain.plan.wire_bytes
    # Half of the numbers of each bucket are sent, in 4 bytes and not in 2.
    wrong["bytes"] = [] if more == sum(bucket.shard_numel for bucket in plain.plan.buckets) * 2 else [f"{more} more"]
    return {label: differ for label, differ in wrong.items() if differ}


@pytest.mark.slow
def test_every_way_to_train_has_the_same_bits() -> None:
    assert run_ranks(_compare_ways, 2) == [{}, {}]


def test_one_process_rounds_what_it_would_reduce() -> None:
    case = CASES["mixed dtypes"]

    def rounding(model: nn.Module) -> torch.optim.Optimizer:
        def take(gradient: Tensor) -> Tensor:
            return gradient.bfloat16().to(gradient.dtype)

        for parameter in model.parameters():
            parameter.register_hook(take)
        return case.optimizer(model)

    expected = train_plain(dataclasses.replace(case, optimizer=rounding), 3)
    for stage in (0, 3):
        assert differences(expected, train_compiled(case, stage, 3, precision=Precision(reduce_dtype="bf16"))) == []


def test_scaled_losses_overflow_where_float16_does_and_not_where_sums_do() -> None:
    steps = 6
    found, plain = (train_scaled("spiky", 3, steps, reduce_dtype=word) for word in ("fp32", None))
    assert found.skipped == plain.skipped and found.scales == plain.scales
    assert found.scales[0] == QUICK["init_scale"]


@pytest.mark.parametrize("wrong", ["fp16", "float32", torch.bfloat16, 1])
def test_another_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"expected reduce_dtype to be 'fp32' or 'bf16', or None, found .* gradients are summed"
    ):
        Precision(reduce_dtype=wrong)


def test_a_plan_for_another_dtype_is_refused() -> None:
    plan = prepare_case(CASES["stack"], 0, 1, reduce_dtype=torch.bfloat16).plan
    assert zerofx.Plan.from_json(plan.to_json()) == plan
    step, args = step_of("stack", plan=plan)
    with pytest.raises(PlanError, match=r"computed in float32, reduced in bfloat16, found .* computed in float32"):
        step(*args)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_regions_reduce_in_it_too() -> None:
    for precision, word in POLICIES:
        options = {"precision": Precision(precision, reduce_dtype=word)}
        expected, found = (
            train_compiled(CASES["stack"], 3, 3, backend=one, **options) for one in ("eager", "inductor")
        )
        assert differences(expected, found, 2e-2) == []
        step, args = step_of("stack", 3, backend="inductor", **options)
        step(*args)
        check_measured(step.measure(*args), step.plan, 4096, share=0.01)
