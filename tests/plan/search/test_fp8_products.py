"""Which products a plan takes in fp8, why, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.runs.fp8 import batches, build, fast_in_fp8, optimizer_of
from zerofx.errors import PlanError, UsageError
from zerofx.scheduler.plan.plan import Plan


class Sizes(nn.Module):
    """Layers of sizes that CUDA does not multiply in fp8, next to some that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 60)
        self.out = nn.Linear(60, 47)
        self.back = nn.Linear(47, 64)
        self.even = nn.Linear(64, 64)
        self.rows = nn.Parameter(torch.randn(64, 32))  # a second factor that lies row by row

    def forward(self, x: Tensor) -> Tensor:
        x = self.even(self.back(F.gelu(self.out(F.gelu(self.into(x))))))
        return (F.gelu(x) @ self.rows).square().mean()


def planned(model: nn.Module, batch: Any, **options: Any) -> Any:
    given = {"machine": fast_in_fp8("h100-sxm"), "precision": "fp8", **options}
    return zerofx.plan(model, optimizer_of(model), batch, **given)


def llama(**options: Any) -> Any:
    args, kwargs = next(batches("llama", 0, 1))
    return planned(build("llama", torch.float32), kwargs or args, **options)


def in_fp8(plan: Plan) -> set[tuple[str, str]]:
    return {(decision.weight, decision.gives) for decision in plan.products if decision.in_fp8}


def test_products_that_cuda_has_not_are_never_in_fp8() -> None:
    plan = planned(Sizes(), (torch.randn(32, 64),)).plan
    assert in_fp8(plan) == {
        ("even.weight", "output"), ("even.weight", "input gradient"), ("even.weight", "weight gradient"),
        ("rows", "output"), ("rows", "input gradient"), ("rows", "weight gradient"),
        ("into.weight", "weight gradient"),  # of 60 rows: any number of those will do
    }  # fmt: skip
    reasons = {(each.weight, each.gives): each.reason for each in plan.products}
    assert reasons["out.weight", "output"] == "K = 60 of 32 x 60 x 47 is no multiple of 16"
    assert reasons["back.weight", "output"] == "K = 47 of 32 x 47 x 64 is no multiple of 16"
    assert reasons["into.weight", "output"] == "N = 60 of 32 x 64 x 60 is no multiple of 16"


def test_a_number_of_rows_that_16_does_not_divide_leaves_gradients_of_weights_alone() -> None:
    plan = planned(Sizes(), (torch.randn(24, 64),)).plan
    assert {gives for _, gives in in_fp8(plan)} == {"output", "input gradient"}


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("machine", "reason"),
    [("a100-80", "a100-80 has no rate for fp8"), ("mi300x", "mi300x has formats of its own for fp8")],
)
def test_a_machine_without_a_rate_for_these_formats_takes_none(machine: str, reason: str) -> None:
    with pytest.warns(zerofx.ZeroFXNotice, match=f"no product is taken in fp8: {reason}"):
        plan = llama(machine=machine).plan
    assert plan.products and not in_fp8(plan)
    assert reason in str(plan)


@pytest.mark.days(3)
def test_small_products_are_slower_in_fp8_and_stay_as_they_are() -> None:
    with pytest.warns(zerofx.ZeroFXNotice, match="no product is taken in fp8"):
        plan = llama(machine="h100-sxm").plan
    assert all("of it for casts, in place of" in each.reason for each in plan.products if each.seconds)


def test_large_ones_are_faster_and_the_plan_says_by_how_much() -> None:
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, device="meta") for _ in range(2)])
    batch = (torch.randn(8192, 8192, device="meta"),)
    given: dict[str, Any] = {"machine": "h100-sxm", "loss_fn": lambda y: y.float().square().mean()}
    plain = planned(model, batch, **{**given, "precision": "bf16"}).plan
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        low = planned(model, batch, **{**given, "precision": zerofx.Precision("bf16", fp8=recipe)}).plan
        chosen = [each for each in low.products if each.in_fp8]
        assert len(chosen) >= 3 and all(each.seconds > 0 for each in chosen)
        assert low.step_seconds < 0.95 * plain.step_seconds
        text = str(low)
        assert f"products in fp8 ({recipe}): {len(chosen)} of 5 of linear layers, " in text
        assert "output in fp8, " in text and " less: " in text
        assert "output in fp8" in low.why("0.weight") and "in fp8" in low.why(chosen[0].node)
        assert "products in fp8: none -> " + recipe in plain.diff(low)
        assert Plan.from_json(low.to_json()) == low


@pytest.mark.days(3)
def test_logits_are_not_in_fp8() -> None:
    plan = llama().plan
    assert {each.reason for each in plan.products if each.weight == "lm_head.weight"} == {
        "it gives the logits of the loss, or is for their gradient"
    }
    assert len(in_fp8(plan)) == 2 * 7 * 3  # all others of two layers


@pytest.mark.days(3)
def test_fp8_is_computed_in_bfloat16_with_masters_in_float32() -> None:
    assert zerofx.Precision.of("fp8") == zerofx.Precision("bf16", fp8="rowwise")
    assert {bucket.compute_dtype for bucket in llama().plan.buckets} == {"torch.bfloat16"}


class Wide(nn.Module):
    """Layers with which a whole product takes long enough for fp8, and a part of one on eight ranks does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((4096, 8192), (8192, 4096)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(F.gelu(self.up(x))).float().square().mean()
        return loss


@pytest.mark.days(3)
def test_products_are_decided_on_as_one_rank_of_the_model_axis_has_them() -> None:
    with zerofx.empty_init():
        model = Wide().bfloat16()
    batch = (torch.empty(2, 2048, 4096, dtype=torch.bfloat16, device="meta"),)
    given: dict[str, Any] = {"machine": "h100-sxm", "precision": zerofx.Precision(fp8="tensorwise")}
    pins = {"up": "column", "down": "row"}
    assert len(in_fp8(planned(model, batch, mesh={"shard": 8}, **given).plan)) == 5
    with pytest.warns(zerofx.ZeroFXNotice, match=r"no product is taken in fp8: .* µs between ranks, in place of"):
        plan = planned(model, batch, mesh={"model": 8}, shardings=pins, **given).plan
    assert len(plan.products) == 5 and not in_fp8(plan)


@pytest.mark.days(3)
def test_ranks_compare_the_largest_magnitudes_of_what_they_have_in_parts() -> None:
    given: dict[str, Any] = {"mesh": {"model": 2}, "shardings": {"*.up_proj": "column", "*.down_proj": "row"}}
    for recipe, num in (("tensorwise", 2), ("rowwise", 0)):  # of the weight, and of the gradient by columns
        planned_step = llama(precision=zerofx.Precision("bf16", fp8=recipe), **given)  # type: ignore[arg-type]
        low = {name for name, _ in in_fp8(planned_step.plan)}
        assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= low
        rows = [row for row in planned_step.schedule().rows if row.op == "all_reduce_values"]
        assert len(rows) > num


@pytest.mark.days(3)
def test_the_fastest_mesh_is_chosen_with_products_in_fp8() -> None:
    step = llama(mesh="auto", world_size=4)
    assert in_fp8(step.plan)
    alone = llama(mesh=dict(zip(("replicate", "shard", "model"), _sizes(step.plan), strict=True)))
    assert alone.plan.step_seconds == step.plan.step_seconds


def _sizes(plan: Plan) -> tuple[int, int, int]:
    return plan.replicate, plan.num_ranks // plan.replicate // plan.model, plan.model


@pytest.mark.days(3)
def test_products_are_chosen_for_each_number_of_micro_batches() -> None:
    args, kwargs = next(batches("llama", 0, 1, 8))
    model, keep = build("llama", torch.float32), {"recompute": "none", "offload": "none", "tile": "none"}
    budget = planned(model, kwargs or args, accumulate=2, **keep).plan.peak_bytes["device"]
    plan = planned(model, kwargs or args, accumulate="auto", memory_budget=budget, **keep).plan
    assert plan.num_micro_batches > 1
    asked = planned(model, kwargs or args, accumulate=plan.num_micro_batches, memory_budget=budget, **keep).plan
    assert plan.products == asked.products and in_fp8(plan)


def test_a_plan_is_for_its_recipe() -> None:
    plan = llama(machine=fast_in_fp8(), backend="eager").plan
    model = build("llama", torch.float32)
    _, kwargs = next(batches("llama", 0, 1))
    given = {"plan": plan, "precision": "bf16", "machine": fast_in_fp8(), "backend": "eager"}
    with pytest.raises(PlanError, match="products in fp8: expected rowwise, found none"):
        zerofx.compile(model, optimizer_of(model), example_batch=kwargs, **given)


def test_a_number_of_micro_batches_is_needed_next_to_the_model_axis() -> None:
    with pytest.raises(UsageError, match="expected accumulate to be a number where the mesh has an axis 'model'"):
        llama(mesh={"model": 2}, accumulate="auto", memory_budget="1GiB")


def test_other_recipes_are_refused() -> None:
    with pytest.raises(UsageError, match="expected fp8 to be 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"):
        zerofx.Precision(fp8="blockwise")  # type: ignore[arg-type]  # what is refused
