"""Training on compiled regions: within rounding of plain PyTorch, and the same bits under every plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib import compiling
from tests.lib.distributed import run_ranks
from tests.lib.fakes import fake_like
from tests.lib.models import CASES, Case, sgd, tokens
from tests.lib.runs.training import differences, train_compiled, train_plain

pytestmark = compiling.trainings

aten = torch.ops.aten
STEPS = 5
TOLERANCE = 1e-4


def _small_gpt() -> GPT:
    return GPT(vocab=19, dim=8, depth=2, heads=2, block=7)


# Plain SGD: Adam divides a gradient that is truly zero (a key's bias) by its own rounding errors.
GPT_CASE = Case(_small_gpt, tokens, optimizer=sgd)
STACK_CASE = replace(CASES["stack"], optimizer=sgd)


def test_one_process_trains_like_eager_mode_within_rounding() -> None:
    found = train_compiled(STACK_CASE, 3, STEPS, backend="inductor")
    assert differences(train_plain(STACK_CASE, STEPS), found, TOLERANCE) == []


def test_sums_by_index_have_one_order_on_several_threads() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def summed(inputs: list[Any]) -> tuple[Tensor, ...]:
        values, rows, columns = inputs
        inputs.clear()
        return (
            aten.embedding_dense_backward.default(values, rows, 7, -1, False),
            aten.scatter_add.default(values.new_zeros(4000, 64), 1, columns, values),
        )

    given = [torch.randn(4000, 64), torch.randint(7, (4000,)), torch.randint(3, (4000, 64))]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fakes = [fake_like(one.shape, one.stride(), one.dtype, "cpu") for one in given]
        compiled = compile_region(summed, fakes, "summed")
        expected = summed(list(given))
        for _ in range(3):
            assert all(map(torch.equal, compiled.call(list(given)), expected))
    finally:
        torch.set_num_threads(num_threads)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_model_that_makes_masks_trains_like_eager_mode_within_rounding_and_the_same_with_all_computed_again() -> None:
    case = replace(CASES["llama masked"], optimizer=sgd)
    first = train_compiled(case, 3, STEPS, backend="inductor")
    assert differences(train_plain(case, STEPS), first, TOLERANCE) == []
    again = train_compiled(case, 3, STEPS, backend="inductor", recompute="full")
    assert differences(first, again, 0.0) == []


@pytest.mark.slow
def test_dropout_draws_and_masks_as_in_eager_mode() -> None:
    case = replace(CASES["gpt2 dropout"], optimizer=sgd)
    found = train_compiled(case, 3, STEPS, backend="inductor")
    assert differences(train_plain(case, STEPS), found, TOLERANCE) == []


def _compare() -> dict[str, list[str]]:
    expected = train_plain(GPT_CASE, STEPS)
    first = train_compiled(GPT_CASE, 3, STEPS, backend="inductor")
    found = {"stage 3 to plain": differences(expected, first, TOLERANCE)}
    for label, stage, options in (
        ("prefetch 0", 3, {"prefetch": 0}), ("stage 2", 2, {}), ("stage 1", 1, {}), ("stage 0", 0, {})
    ):  # fmt: skip
        other = train_compiled(GPT_CASE, stage, STEPS, **{"backend": "inductor", **options})
        found[f"{label} to plain"] = differences(expected, other, TOLERANCE)
        found[f"{label} to stage 3"] = differences(first, other, 0.0)
    return {label: wrong for label, wrong in found.items() if wrong}


@pytest.mark.slow
def test_two_ranks_train_within_rounding_of_distributed_data_parallel_and_the_same_under_every_plan() -> None:
    for rank, wrong in enumerate(run_ranks(_compare, 2, timeout=1800.0)):
        assert wrong == {}, f"rank {rank}"


class _Patches(nn.Module):
    """Depthwise convolutions of images that a norm has permuted, as in a ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.depthwise = nn.Conv2d(3, 48, 4, stride=4), nn.Conv2d(48, 48, 7, padding=3, groups=48)
        self.norm, self.norm_2 = nn.LayerNorm(48), nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.patches(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        found: Tensor = self.norm_2(self.depthwise(normed).permute(0, 2, 3, 1)).square().mean()
        return found


def test_a_step_in_half_precision_holds_what_is_planned() -> None:
    model = nn.Conv2d(32, 64, 3, padding=1)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), precision="bf16",
        loss_fn=lambda outputs, x: outputs.square().mean(),
    )  # fmt: skip
    found = step.measure(torch.randn(8, 32, 32, 32), num_steps=2)
    assert found.peak_bytes["device"] == pytest.approx(step.plan.peak_bytes["device"], rel=1e-3)


@pytest.mark.slow
def test_the_peak_of_a_compiled_step_is_enough_for_a_budget() -> None:
    x, budget = torch.randn(8, 3, 64, 64), None
    for _ in range(2):
        model = _Patches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        step = zerofx.compile(model, optimizer, memory_budget=budget, example_batch=(x,))
        peak = step.plan.peak_bytes["device"]
        assert step.measure(x).peak_bytes["device"] == pytest.approx(peak, rel=0.01)
        assert peak <= (budget or peak)
        budget = peak
        step.close()
