"""Micro-batches train as a loop with `(loss / n).backward()` does, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Convolutions, Stack, Swapped, adamw
from tests.lib.runs.offloads import offloading, prepare_case, recomputing
from tests.lib.runs.training import compare_runs, differences, train_compiled, train_plain
from zerofx import MemoryBudgetError, Plan, UsageError
from zerofx.driver.plan_only import PlannedStep

NAMES = [
    "gpt",
    "batchnorm",
    "channels last",
    "llama",
    "gpt2 dropout",
    "buffers",
    "swapped buffers",
    "tied",
    "arguments",
]
RUNS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "recomputed": {"stage": 3, "recompute": "full"},
}


def gpt(rows: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return GPT(vocab=19, dim=16, depth=2, heads=2, block=16), (
        torch.randint(19, (rows, 16)), torch.randint(19, (rows, 16)),
    )  # fmt: skip


def planned(accumulate: Any, budget: int | None = None, rows: int = 4, **options: Any) -> PlannedStep:
    model, batch = gpt(rows)
    return zerofx.plan(
        model,
        adamw(model),
        batch,
        machine="cpu",
        backend="eager",
        accumulate=accumulate,
        memory_budget=budget,
        **options,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", NAMES)
def test_one_process_trains_like_a_loop(name: str) -> None:
    assert compare_runs([name], RUNS, steps=3, accumulate=2) == {}


def test_as_many_micro_batches_as_samples_train_like_a_loop() -> None:
    assert compare_runs(["stack", "batchnorm"], RUNS, steps=3, accumulate=4) == {}


PLANS: dict[str, dict[str, Any]] = {
    "all kept": {"stage": 3, "keep_gathered": "all"},
    "recomputed": {"stage": 3, "recompute": "full"},
}


def _at(*stages: int) -> dict[str, dict[str, Any]]:
    return {f"stage {stage}": {"stage": stage} for stage in stages}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("what", [*_at(0, 1, 2, 3), *PLANS])
@pytest.mark.parametrize("name", ["stack", "batchnorm", "gpt2 dropout"])
def test_two_ranks_train_like_distributed_data_parallel_without_a_reduction_for_each(name: str, what: str) -> None:
    runs = {what: (_at(0, 1, 2, 3) | PLANS)[what]}
    for rank, wrong in enumerate(run_ranks(compare_runs, 2, [name], runs, 0.0, 2, 2)):
        assert wrong == {}, f"rank {rank}"


def _compare_each(name: str, stage: int, accumulate: int) -> dict[str, list[str]]:
    return compare_runs([name], _at(stage), steps=2, accumulate=accumulate, each=True)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("name", "accumulate"), [("stack", 2), ("stack", 4), ("batchnorm", 2), ("gpt2 dropout", 2)])
def test_two_ranks_train_like_distributed_data_parallel_with_one(name: str, accumulate: int, stage: int) -> None:
    for rank, wrong in enumerate(run_ranks(_compare_each, 2, name, stage, accumulate)):
        assert wrong == {}, f"rank {rank}"


def _compare_auto() -> tuple[int, list[str]]:
    case = CASES[
        "batchnorm"
    ]  # of which activations are most; the others' peaks are at gradients, held by either number
    budget = _between(*(_peak(case.model, case.batch, number) for number in (1, 2)))
    options: dict[str, Any] = {"memory_budget": budget, "recompute": "none"}
    model = case.model()
    step = zerofx.compile(model, adamw(model), 0, backend="eager", accumulate="auto", **options)
    args, _ = case.batch(torch.Generator().manual_seed(0))
    step.prepare(*args)
    number = step.plan.num_micro_batches
    step.close()
    found = train_compiled(case, 0, steps=2, accumulate="auto", **options)
    return number, differences(train_plain(case, 2, number), found)


def _peak(model_of: Callable[[], nn.Module], batch_of: Any, number: int) -> int:
    model, (args, _) = model_of(), batch_of(torch.Generator().manual_seed(0))
    step = zerofx.plan(model, adamw(model), args, 0, machine="cpu", backend="eager", accumulate=number, world_size=2)
    return step.plan.peak_bytes["device"]


def _between(more: int, less: int) -> int:
    assert less < more
    return (more + less) // 2


def test_ranks_take_the_number_that_rank_0_chose() -> None:
    assert run_ranks(_compare_auto, 2) == [(2, [])] * 2


def test_a_memory_budget_holds_and_trains_the_same_bits() -> None:
    free = planned(2).plan.peak_bytes["device"]
    model, batch = gpt()
    results = []
    for budget in (None, int(0.8 * free)):
        trained = copy.deepcopy(model)
        step = zerofx.compile(trained, adamw(trained), backend="eager", accumulate=2, memory_budget=budget)
        results.append([*(step(*batch) for _ in range(2)), *(p.detach().clone() for p in trained.parameters())])
        if budget is not None:
            assert step.plan.recomputes and step.measure(*batch).peak_bytes["device"] <= budget
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_was_offloaded_comes_back_in_its_own_micro_batch(name: str) -> None:
    case = CASES[name]
    prepared = prepare_case(case, 0, 1, num_micro_batches=2)
    plan = offloading(prepared, recomputing(prepared), ["host"])
    later = [decision for decision in plan.offloads if decision.value.startswith("micro1_")]
    assert 0 < len(later) < len(plan.offloads)
    assert not differences(train_plain(case, 3, 2), train_compiled(case, 0, 3, plan=plan))


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_falls_with_the_number_and_is_the_measured_one(recompute: Any) -> None:
    peaks = []
    for number in (1, 2, 4):
        model, batch = gpt()
        step = zerofx.compile(model, adamw(model), backend="eager", accumulate=number, recompute=recompute)
        measured = step.measure(*batch)
        assert step.plan.peak_bytes["device"] == measured.peak_bytes["device"]
        peaks.append(step.plan.peak_bytes["device"])
    assert peaks == sorted(set(peaks), reverse=True)


def test_gradients_are_reduced_once_and_kept_buckets_gathered_once() -> None:
    options: dict[str, Any] = {"world_size": 2, "keep_gathered": "all"}
    one, four = planned(1, **options).plan, planned(4, reduce="once", **options).plan
    assert four.wire_bytes == one.wire_bytes
    assert len(four.gathers) == len(one.gathers) and len(four.reduces) == len(one.reduces)
    assert planned(4, world_size=2).plan.wire_bytes > planned(1, world_size=2).plan.wire_bytes


def test_gradients_are_reduced_in_each_micro_batch_where_they_stay_in_slices() -> None:
    once, each = (planned(4, stage=2, world_size=2, reduce=reduce).plan for reduce in ("once", "each"))
    whole = sum(bucket.shard_numel * 2 * 4 for bucket in once.buckets)
    assert each.wire_bytes == once.wire_bytes + 3 * whole // 2
    assert all(decision.earlier for decision in planned(4, stage=2, world_size=2).plan.reduces)
    assert not any(decision.earlier for decision in planned(4, stage=1, world_size=2).plan.reduces)
    assert all("reduced in each micro-batch" in decision.reason for decision in each.reduces)


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"model": 2}, "shardings": {"layers.*.mlp.*": "column"}},
        {"mesh": {"replicate": 2}, "states_over": "shard", "stage": 2},
    ],
)
def test_gradients_that_are_not_summed_or_all_updated_on_each_rank_are_not_reduced_in_each(
    options: dict[str, Any],
) -> None:
    step = planned(2, world_size=2, reduce="each", **options)
    summed = {bucket.index for bucket in step.layout.buckets if bucket.num_reduced > 1 and bucket.num_ranks > 1}
    assert {decision.bucket for decision in step.plan.reduces if decision.earlier} == summed
    assert len(summed) < len(step.layout.buckets)


def test_a_budget_takes_slices_of_gradients_before_anything_is_computed_again() -> None:
    options: dict[str, Any] = {"world_size": 8, "stage": 2, "order": "micro-batch"}
    once, each = (planned(4, reduce=reduce, **options).plan.peak_bytes["device"] for reduce in ("once", "each"))
    budget = (each + once) // 2
    plan = planned(4, budget, **options).plan
    assert plan.peak_bytes["device"] <= budget < once
    assert not plan.recomputes and any(decision.earlier for decision in plan.reduces)


def test_auto_without_a_budget_is_one() -> None:
    assert planned("auto").plan == planned(1).plan


def test_auto_divides_no_further_than_a_budget_asks() -> None:
    two = planned(2, recompute="none").plan.peak_bytes["device"]
    found = planned("auto", two, recompute="none")
    assert found.plan.num_micro_batches == 2
    assert "2 micro-batches before each update: the fastest that fits" in str(found.plan)
    assert "1 need" in found.plan.why("accumulate")
    assert "micro-batches: 1 -> 2" in planned(1).plan.diff(found.plan)


@pytest.mark.days(3)
def test_auto_refuses_with_the_least_of_all_numbers() -> None:
    with pytest.raises(MemoryBudgetError, match="least possible") as refused:
        planned("auto", 1000, recompute="none")
    least = planned(4, recompute="none").plan.peak_bytes["device"]
    assert f"({least} bytes)" in str(refused.value)


def test_a_plan_brings_its_number_with_it() -> None:
    plan = Plan.from_json(planned(4).plan.to_json())
    model, batch = gpt()
    step = zerofx.compile(model, adamw(model), backend="eager", machine="cpu", plan=plan)
    step(*batch)
    assert step.plan.num_micro_batches == 4
    step.close()
    with pytest.raises(UsageError, match=r"accumulate=4, .*found 2"):
        zerofx.compile(model, adamw(model), plan=plan, accumulate=2)


def test_one_step_takes_batches_of_several_shapes() -> None:
    model, _ = gpt()
    reference = copy.deepcopy(model)
    optimizer = adamw(reference)
    step = zerofx.compile(model, adamw(model), backend="eager", accumulate=2)
    for rows in (4, 8):
        batch = gpt(rows)[1]
        optimizer.zero_grad()
        for part in (0, 1):
            (reference(*(tensor.chunk(2)[part] for tensor in batch)) / 2).backward()
        optimizer.step()
        if rows == 4:
            step(*batch)
        else:
            with pytest.warns(UserWarning, match="another shape"):
                step(*batch)
    found = step.full_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())


class Weighted(Stack):
    """Takes weights that are the same for all samples."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return super().forward(x if weight is None else x * weight, y)


def test_a_tensor_of_another_leading_size_is_used_whole() -> None:
    torch.manual_seed(0)
    model = Weighted()
    x, y, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = sum((model(x[i : i + 2], y[i : i + 2], weight) / 2).detach() for i in (0, 2))
    step = zerofx.compile(model, adamw(model), backend="eager", accumulate=2)
    assert torch.equal(step(x, y, weight=weight), torch.as_tensor(expected))


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "two", None])
def test_what_is_no_number_of_micro_batches_is_refused(number: Any) -> None:
    model, _ = gpt()
    with pytest.raises(UsageError, match=r"accumulate .* 1 or more, or 'auto'"):
        zerofx.compile(model, adamw(model), accumulate=number)


def test_a_batch_that_cannot_be_divided_is_refused_and_nothing_is_changed() -> None:
    model, batch = gpt(6)
    before = copy.deepcopy(model.state_dict())
    step = zerofx.compile(model, adamw(model), backend="eager", accumulate=4)
    with pytest.raises(UsageError, match="accumulate=4 divides, found 6"):
        step(*batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    step(*gpt(8)[1])


def test_a_batch_without_a_dimension_cannot_be_divided() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="found no tensor with a dimension"):
        zerofx.plan(model, adamw(model), {"input": torch.tensor(1.0)}, accumulate=2, loss_fn=lambda out, **_: out.sum())


def test_the_largest_micro_batch_is_not_divided() -> None:
    model, _ = gpt()
    with pytest.raises(UsageError, match="expected no accumulate for largest_micro_batch"):
        zerofx.largest_micro_batch(lambda n: gpt(n)[1], model, adamw(model), accumulate=2)


def test_bf16_accumulates_within_tolerance() -> None:
    model, batch = gpt()
    exact = copy.deepcopy(model)
    step = zerofx.compile(model, adamw(model), backend="eager", accumulate=4, precision="bf16")
    loss = zerofx.compile(exact, adamw(exact), backend="eager")(*batch)
    torch.testing.assert_close(step(*batch).float(), loss, rtol=2e-2, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [gpt, lambda: (Convolutions(), (torch.randn(8, 3, 8, 8), torch.randint(5, (8,))))])
def test_compiled_regions_train_like_eager_ones(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    results = []
    for backend in ("eager", "inductor"):
        trained = copy.deepcopy(model)
        step = zerofx.compile(trained, torch.optim.SGD(trained.parameters(), lr=0.1), backend=backend, accumulate=4)
        results.append([*(step(*batch) for _ in range(3)), *(p.detach() for p in trained.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_swapped_buffers_change_places_in_every_micro_batch() -> None:
    torch.manual_seed(0)
    model = Swapped()
    step = zerofx.compile(model, adamw(model), backend="eager", accumulate=4)
    step(torch.randn(8, 8), torch.randn(8, 8))
    assert float(model.a[0]) == 0.0 and float(model.b[0]) == 1.0
