"""Micro-batches that run layer by layer train as one after the other do, with less traffic and exact peaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.models import adamw
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.stages import Dropping, Run, are_equal, train_runs
from tests.lib.runs.training import compare_runs
from zerofx import UsageError
from zerofx.driver.plan_only import PlannedStep

LAYER: dict[str, dict[str, Any]] = {
    "layer by layer": {"stage": 3, "order": "layer"},
    "recomputed": {"stage": 3, "order": "layer", "recompute": "full"},
}


class Chosen(nn.Module):
    """A layer whose draws depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.multinomial(self.linear(x).softmax(-1), 1)
        found: Tensor = self.linear(x).gather(-1, chosen).mean()
        return found


def gpt(rows: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(vocab=19, dim=16, depth=4, heads=2, block=16)
    return model, (torch.randint(19, (rows, 16)), torch.randint(19, (rows, 16)))


def train(make: Callable[[], nn.Module], accumulate: int, **options: Any) -> tuple[zerofx.Step, list[Tensor]]:
    """A step after three updates, with losses, parameters, and what is drawn next."""
    torch.manual_seed(0)
    model = make()
    step = zerofx.compile(model, adamw(model), accumulate=accumulate, **options)
    generator = torch.Generator().manual_seed(1)
    losses = [step(*torch.randint(19, (2, 2 * accumulate, 16), generator=generator)) for _ in range(3)]
    return step, [*losses, *step.full_state_dict().values(), torch.rand(3)]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name", ["gpt", "batchnorm", "channels last", "llama", "gpt2 dropout", "buffers", "swapped buffers", "tied", "t5",
             "bert dropout", "mixtral", "vit", "mixed dtypes", "shared module"]
)  # fmt: skip
def test_one_process_trains_like_a_loop(name: str) -> None:
    assert compare_runs([name], LAYER, steps=3, accumulate=2) == {}


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["stack", "batchnorm", "buffers", "swapped buffers"])
def test_rounds_of_loops_train_like_a_loop(name: str) -> None:
    assert compare_runs([name], LAYER, steps=2, accumulate=4) == {}


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "accumulate"), [("stack", 4), ("batchnorm", 2), ("gpt2 dropout", 2)])
def test_two_ranks_train_like_distributed_data_parallel(name: str, accumulate: int, stage: int) -> None:
    runs = {"layer by layer": {"stage": stage, "order": "layer"}}
    for rank, wrong in enumerate(run_ranks(compare_runs, 2, [name], runs, 0.0, 2, accumulate)):
        assert wrong == {}, f"rank {rank}"


def test_micro_batches_draw_what_they_draw_one_by_one() -> None:
    _, expected = train(partial(Dropping, 3), 5, backend="eager", order="micro-batch")
    step, found = train(partial(Dropping, 3), 5, backend="eager", order="layer")
    assert step.plan.by_layer and equal(found, expected)


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "max_grad_norm": 0.5}, {"precision": "fp16"}])
def test_bits_and_peaks_hold_with_slower_tiers(
    tier: str, options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_NVME_DIR", str(tmp_path))

    def make() -> nn.Module:
        return GPT(vocab=19, dim=32, depth=4, heads=2, block=16)

    free, expected = train(make, 5, backend="eager", order="layer", **options)
    budget = int(0.7 * free.plan.peak_bytes["device"])
    offloading = {"memory_budget": budget, "offload": tier, "recompute": "none"}
    step, found = train(make, 5, backend="eager", order="layer", **offloading, **options)
    assert equal(found, expected) and step.plan.by_layer and tier in step.plan.peak_bytes
    measured = step.measure(*torch.randint(19, (2, 10, 16)), num_steps=1)
    assert measured.peak_bytes == step.plan.peak_bytes and measured.peak_bytes["device"] <= budget


def planned(rows: int, **options: Any) -> PlannedStep:
    model, batch = gpt(rows)
    return zerofx.plan(model, adamw(model), batch, machine="cpu", backend="eager", **options)


@pytest.mark.days(3)
@pytest.mark.parametrize("num", [2, 3, 8])
def test_parameters_come_and_gradients_go_once_a_step(num: int) -> None:
    alone = planned(1, world_size=2).plan
    by_layer = planned(num, world_size=2, accumulate=num, order="layer").plan
    one_by_one = planned(num, world_size=2, accumulate=num, reduce="once").plan
    assert by_layer.wire_bytes == alone.wire_bytes < one_by_one.wire_bytes
    assert len(by_layer.gathers) == len(alone.gathers)


@pytest.mark.days(3)
def test_a_plan_and_its_file_do_not_grow_with_micro_batches() -> None:
    few, many = (planned(num, accumulate=num, order="layer") for num in (4, 16))
    assert len(few.lowered.emitted.source.splitlines()) == len(many.lowered.emitted.source.splitlines())


@pytest.mark.days(3)
def test_a_budget_with_parameters_elsewhere_is_planned_layer_by_layer() -> None:
    free = planned(8, accumulate=8, world_size=2).plan.peak_bytes["device"]
    plan = planned(8, accumulate=8, world_size=2, memory_budget=free).plan
    assert plan.by_layer and "layer by layer" in plan.micro_batches_reason
    assert "8 micro-batches before each update, layer by layer" in str(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"reduce": "each"}, "reduced once a step"), ({"offload": {"gradients": "host"}}, "wait for the next")],
)
def test_what_needs_micro_batches_one_by_one_is_refused(options: dict[str, Any], message: str) -> None:
    model, batch = gpt(4)
    with pytest.raises(UsageError, match=message):
        zerofx.plan(model, adamw(model), batch, machine="cpu", accumulate=2, order="layer", **options)


@pytest.mark.days(3)
def test_ranks_that_share_a_computation_draw_as_one_by_one() -> None:
    shared = (("machine", SHARING), ("reduce", "once"))
    runs = [Run("dropout", {"model": 2}, 5, (*shared, ("order", order)), 3) for order in ("layer", "micro-batch")]
    for by_layer, one_by_one in run_ranks(train_runs, 2, runs):
        assert are_equal(by_layer, one_by_one) and by_layer.measured == by_layer.predicted


def test_draws_that_depend_on_values_are_refused() -> None:
    model = Chosen()
    with pytest.raises(UsageError, match=r"multinomial.*leave order= out"):
        zerofx.plan(model, adamw(model), (torch.randn(4, 4),), machine="cpu", accumulate=2, order="layer")
