from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.budgets import least_bytes
from tests.lib.chains import MLP, Attention, Block, Stack, mlps
from zerofx.errors import MemoryBudgetError, UsageError


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def check_training(
    step: zerofx.Step, reference: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, num_steps: int
) -> None:
    """The step's losses are those of ``reference`` trained in eager mode, within tolerance."""
    for _ in range(num_steps):
        loss = reference(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x), loss.detach())


def test_a_hidden_size_eight_times_as_large_trains_in_the_same_budget() -> None:
    x = torch.randn(2048, 8)
    small, large = (mlps(2, dim=8, inner=inner) for inner in (64, 512))
    budget = least_bytes(small, (x,), optimizer=sgd(small), tile="none")
    untiled = copy.deepcopy(large)
    with pytest.raises(MemoryBudgetError, match="tile='auto'"):
        zerofx.plan(untiled, sgd(untiled), (x,), machine="cpu", memory_budget=budget, backend="eager", tile="none")
    reference = copy.deepcopy(large)
    step = zerofx.compile(large, sgd(large), machine="cpu", memory_budget=budget, backend="eager")
    optimizer = sgd(reference)
    check_training(step, reference, optimizer, x, 2)
    assert step.plan.tiles
    measured = step.measure(x).peak_bytes["device"]
    assert measured <= budget
    assert measured == pytest.approx(step.plan.peak_bytes["device"], rel=0.02)


@pytest.mark.days(3)
def test_peaks_fall_with_the_budget_through_all_ways_to_tile() -> None:
    model, x = mlps(2, dim=8, inner=64), torch.randn(1024, 8)
    least, most = (least_bytes(model, (x,), optimizer=sgd(model), tile=tiling) for tiling in ("auto", "none"))
    peaks, numbers = [], []
    for share in (1.0, 0.5, 0.25, 0.1, 0.0):
        made = zerofx.plan(
            model, sgd(model), (x,), machine="cpu", backend="eager", memory_budget=least + int(share * (most - least))
        ).plan
        peaks.append(made.peak_bytes["device"])
        numbers.append(max((tiled.num_tiles for tiled in made.tiles), default=1))
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] == least < most
    assert numbers == sorted(numbers) and numbers[0] == 1 < numbers[-1]


def test_modules_are_tiled_by_name_without_a_budget() -> None:
    model, x = mlps(3, dim=8, inner=64), torch.randn(64, 8)
    reference = copy.deepcopy(model)
    step = zerofx.compile(model, sgd(model), machine="cpu", backend="eager", tile={"layers.1.mlp": 4, "layers.2": 2})
    torch.testing.assert_close(step(x), reference(x).detach())
    assert [(tiled.layer, tiled.num_tiles) for tiled in step.plan.tiles] == [
        ("layers.1.mlp.up", 4),
        ("layers.2.mlp.up", 2),
    ]
    assert "as asked for layers.2" in step.plan.why("layers.2")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing Inductor warns
def test_compiled_tiles_train_like_the_whole() -> None:
    block = Block(Attention(16, 2, fused=True), MLP(16, 64, gated=False, bias=True, activation="gelu"), 16)
    model, x = Stack(block, copy.deepcopy(block)), torch.randn(4, 32, 16)
    reference = copy.deepcopy(model)
    step = zerofx.compile(model, sgd(model), machine="cpu", tile={"": 4})
    optimizer = sgd(reference)
    check_training(step, reference, optimizer, x, 3)
    assert len(step.plan.tiles) == 4
    assert step.num_regions > 4 * 2 * 4 > step.num_distinct_regions
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing Inductor warns
@pytest.mark.parametrize("mask", ["shared", "own"])
def test_compiled_tiles_of_masked_attention_train_like_the_whole(mask: str) -> None:
    model, x = Stack(Attention(8, 2, fused=True, mask=mask)), torch.randn(3, 32, 8)
    reference = copy.deepcopy(model)
    step = zerofx.compile(model, sgd(model), machine="cpu", tile={"": 3})
    optimizer = sgd(reference)
    check_training(step, reference, optimizer, x, 3)
    assert [one.num_tiles for one in step.plan.tiles] == [3]
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [{"layers.9": 2}, {"layers.0": 65}])
def test_names_without_anything_to_tile_are_refused(tile: dict[str, int]) -> None:
    model, x = mlps(1, dim=8, inner=64), torch.randn(64, 8)
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.up \(up to 64\)"):
        zerofx.plan(model, sgd(model), (x,), tile=tile)


def test_a_single_tile_is_refused() -> None:
    model = mlps()
    with pytest.raises(UsageError, match="2 or more"):
        zerofx.compile(model, sgd(model), tile={"layers.0": 1})


@pytest.mark.slow
def test_a_gpts_least_peak_falls_with_chains_in_tiles() -> None:
    model = GPT(64, 32, 2, 4, 128)
    ids = torch.randint(64, (4, 129))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    budget = least_bytes(model, batch, optimizer=sgd(model))
    step = zerofx.compile(model, sgd(model), machine="cpu", memory_budget=budget, backend="eager")
    first = float(step(*batch))
    assert float(step(*batch)) < first
    assert any("addmm" in decision.value for decision in step.plan.tiles)
    assert step.measure(*batch).peak_bytes["device"] == pytest.approx(step.plan.peak_bytes["device"], rel=0.02)
