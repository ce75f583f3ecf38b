"""Plans within a budget: they fit, they are monotonic, and they train the same bits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from gpt import GPT
from zerofx.capture.trace import Batch, capture
from zerofx.driver.plan_only import PlannedStep, plan
from zerofx.errors import MemoryBudgetError
from zerofx.options import Backend
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.saved_values import crossing_storages
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.activations import menu, segments
from zerofx.scheduler.search.order import order_moves

BUDGETS = (1.0, 0.6, 0.3, 0.1, 0.0)  # between the least possible and what keeping everything takes


class Layer(nn.Module):
    """A chain of the operators named, with a residual connection around it."""

    def __init__(self, dim: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.linears = nn.ModuleList(nn.Linear(dim, dim) for name in names if name == "linear")

    def forward(self, x: Tensor) -> Tensor:
        y, linears = x, iter(self.linears)
        for name in self.names:
            y = next(linears)(y) if name == "linear" else getattr(torch, name)(y)
        return x + y


class Chain(nn.Module):
    def __init__(self, dim: int, names: tuple[str, ...], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, names) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gpt() -> tuple[nn.Module, tuple[Tensor, ...] | dict[str, Tensor]]:
    ids = torch.randint(32, (4, 33))
    return GPT(32, 32, 3, 4, 32), (ids[:, :-1], ids[:, 1:])


def llama() -> tuple[nn.Module, tuple[Tensor, ...] | dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(3, 32, (4, 32))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def encoder_decoder() -> tuple[nn.Module, tuple[Tensor, ...] | dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    ids = torch.randint(3, 32, (4, 32))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def convnet() -> tuple[nn.Module, tuple[Tensor, ...] | dict[str, Tensor]]:
    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.SiLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(block(8) for _ in range(3))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.stem(x)
            for inner in self.blocks:
                x = x + inner(x)
            return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)

    return Net(), (torch.randn(4, 3, 16, 16), torch.randint(5, (4,)))


def run(step: zerofx.Step, batch: tuple[Any, ...] | Mapping[str, Any]) -> Tensor:
    loss: torch.Tensor = step(**batch) if isinstance(batch, Mapping) else step(*batch)
    return loss


def least_and_most(model: nn.Module, batch: Any, backend: Backend = "eager") -> tuple[int, int]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False if backend == "eager" else None)
    with pytest.raises(MemoryBudgetError) as refused:
        plan(model, optimizer, batch, machine="cpu", memory_budget=1, backend=backend)
    least = int(str(refused.value).split(" bytes)")[0].split("(")[-1])
    return least, plan(model, optimizer, batch, machine="cpu", backend=backend).plan.peak_bytes["device"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "make", [gpt, convnet, pytest.param(llama, marks=SLOW), pytest.param(encoder_decoder, marks=SLOW)]
)
def test_at_every_budget_the_plan_fits_and_trains_the_same_bits(make: Any) -> None:
    model, batch = make()
    least, most = least_and_most(model, batch)
    reference: list[Tensor] | None = None
    peaks, num_whole = [], 0
    for share in BUDGETS:
        budget = least + int(share * (most - least))
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, foreach=False)
        step = zerofx.compile(trained, optimizer, backend="eager", memory_budget=budget)
        losses = [run(step, batch) for _ in range(3)]
        results = [*losses, *(p.detach() for p in trained.parameters())]
        reference = reference or results
        if step.plan.slices:  # a BLAS may sum otherwise for other numbers of columns
            torch.testing.assert_close(losses, reference[: len(losses)], rtol=1e-5, atol=1e-6)
        else:
            num_whole += 1
            assert all(torch.equal(one, other) for one, other in zip(results, reference, strict=True))
        predicted = step.plan.peak_bytes["device"]
        assert predicted <= budget
        peaks.append(predicted)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == least
    assert num_whole >= len(BUDGETS) - 1


def test_what_a_refusal_says_is_possible_does_not_depend_on_the_budget_and_is() -> None:
    """With parameters in slices: far below the budget as just below it."""
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    least, most = least_and_most(model, batch)
    for budget in (least // 2, least - 1):
        with pytest.raises(MemoryBudgetError, match=rf"\({least} bytes\)"):
            plan(model, optimizer, batch, machine="cpu", memory_budget=budget, backend="eager")
    found = plan(model, optimizer, batch, machine="cpu", memory_budget=least, backend="eager").plan
    assert found.peak_bytes["device"] == least < most
    assert found.slices


def test_a_budget_below_the_least_possible_says_what_is_and_what_is_live_there() -> None:
    model, batch = gpt()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(MemoryBudgetError, match=r"least possible is .* at \w+, where these are live: .*optimizer") as e:
        zerofx.compile(
            model, torch.optim.AdamW(model.parameters()), backend="eager", memory_budget=1000, example_batch=batch
        )
    assert "To lower it: a smaller micro-batch" in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_least_possible_can_be_had() -> None:
    model, batch = gpt()
    least, _ = least_and_most(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    made = plan(model, optimizer, batch, machine="cpu", memory_budget=least, backend="eager").plan
    assert made.peak_bytes["device"] <= least


def test_without_recompute_a_budget_asks_for_the_option() -> None:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(MemoryBudgetError, match="recompute='auto'"):
        plan(model, optimizer, batch, machine="cpu", memory_budget=1000, recompute="none")


def test_every_recomputed_value_has_a_reason_with_its_price() -> None:
    model, batch = gpt()
    least, most = least_and_most(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    made = plan(model, optimizer, batch, machine="cpu", memory_budget=(least + most) // 2).plan
    assert made.recomputes
    assert all("frees" in decision.reason and "of computation" in decision.reason for decision in made.recomputes)


def test_earlier_layers_are_recomputed_first() -> None:
    model, batch = gpt()
    least, most = least_and_most(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    made = plan(model, optimizer, batch, machine="cpu", memory_budget=most - (most - least) // 10)
    layers = {decision.reason.split(" for ")[1].split(":")[0] for decision in made.plan.recomputes}
    assert layers and layers <= {"layers.0", "layers.1"}
    for decision in made.plan.recomputes:
        assert any(f"for {layer}:" in decision.reason for layer in layers if decision.layer.startswith(layer))


class Stem(nn.Module):
    """What is before the layers holds most of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(torch.tanh(nn.functional.gelu(torch.sigmoid(self.wide(x)))))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_what_is_outside_layers_is_computed_again_too() -> None:
    torch.manual_seed(0)
    model, batch = Stem(), (torch.randn(256, 16),)
    least, most = least_and_most(model, batch)
    assert most - least > 256 * 64 * 4 // 2
    ours = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(ours.parameters(), foreach=False)
    # At the least budget layers run in tiles, which sum in another order.
    step = zerofx.compile(ours, optimizer, machine="cpu", backend="eager", memory_budget=(least + most) // 2)
    reference = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        loss = model(*batch)
        loss.backward()
        reference.step()
        reference.zero_grad()
        assert torch.equal(step(*batch), loss.detach())
    assert any(decision.layer in ("wide", "") for decision in step.plan.recomputes)
    assert any("for the piece" in decision.reason for decision in step.plan.recomputes)
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_menu_keeps_less_and_computes_more_at_every_level() -> None:
    model, batch = gpt()
    assert isinstance(batch, tuple)
    step = capture(model, Batch.of(batch, {}))
    simplify(step)
    parts = [part for part in segments(step) if part.unit]
    assert [part.unit for part in parts] == [f"layers.{i}" for i in range(3)]
    assert len({part.key for part in parts}) == 1
    levels = menu(parts[0], Machine.named("cpu"))
    assert len(levels) > 2
    for before, after in itertools.pairwise(levels):
        assert after.num_bytes < before.num_bytes and after.seconds > before.seconds
    crossing = crossing_storages(step)
    assert all(parts[0].values[i] in crossing for i in levels[0].kept)


def test_moves_of_a_layer_stay_in_order_and_the_best_come_first() -> None:
    model, batch = gpt()
    assert isinstance(batch, tuple)
    step = capture(model, Batch.of(batch, {}))
    simplify(step)
    menus = [menu(part, Machine.named("cpu")) for part in segments(step)]
    moves = order_moves(menus)
    for number in range(len(menus)):
        assert [m.level for m in moves if m.item == number] == list(range(1, len(menus[number])))
    assert moves[0].rate == max(move.rate for move in moves)


OPERATORS = st.lists(st.sampled_from(["linear", "tanh", "sigmoid", "sin", "cos"]), min_size=1, max_size=6).filter(
    lambda names: "linear" in names
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(names=OPERATORS, depth=st.integers(1, 3), share=st.floats(0, 1))
def test_random_chains_fit_their_budget_and_train_the_same_bits(names: list[str], depth: int, share: float) -> None:
    torch.manual_seed(0)
    model = Chain(8, tuple(names), depth)
    batch = (torch.randn(16, 8),)
    least, most = least_and_most(model, batch)
    budget = least + int(share * (most - least))
    results = []
    for limit in (None, budget):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), foreach=False)
        step = zerofx.compile(trained, optimizer, backend="eager", memory_budget=limit)
        results.append([*(step(*batch) for _ in range(2)), *(p.detach() for p in trained.parameters())])
        if limit is not None:
            assert step.plan.peak_bytes["device"] <= limit
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [2])
def test_sharded_plans_are_monotonic_in_the_budget(world_size: int) -> None:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def at(budget: int | None) -> PlannedStep:
        return plan(model, optimizer, batch, machine="cpu", world_size=world_size, memory_budget=budget)

    with pytest.raises(MemoryBudgetError) as refused:
        at(1)
    least = int(str(refused.value).split(" bytes)")[0].split("(")[-1])
    most = at(None).plan.peak_bytes["device"]
    peaks = [at(least + int(share * (most - least))).plan.peak_bytes["device"] for share in BUDGETS]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == least
