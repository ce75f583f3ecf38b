"""Ranks that share a sequence: one head, which no rank can have alone, attends to the tokens of all."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.chains import Stack
from tests.lib.distributed import run_ranks
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import world
from zerofx.scheduler.cost.sharding_seconds import Prices

pytestmark = pytest.mark.captures

NUM_TOKENS, WIDTH = 64, 16
MACHINE = replace(SHARING, inter_node=SHARING.intra_node, device=replace(SHARING.device, memory_bandwidth=1e11))
DEAR_MEMORY = Prices(seconds_per_byte=1e-8)  # so that nothing is gathered that can be handed around


class Layer(nn.Module):
    """Attention of one head, each token to those before it, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (matrix(y).unsqueeze(1) for matrix in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        return x + torch.tanh(self.product(attended))


class Sequence(Stack):
    """Two layers and the mean square of what they give."""

    def __init__(self) -> None:
        super().__init__(Layer(), Layer())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Sequence()
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def batches(num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, NUM_TOKENS, WIDTH, generator=generator) for _ in range(num_steps)]


def _differences(rings: bool, num_steps: int, options: dict[str, Any]) -> tuple[float, bool, bool]:
    """The largest difference to one process, relative to what is compared; whether tokens and keys are shared."""
    model, optimizer = build()
    options = {"backend": "eager", "mesh": {"model": world()[1]}, "machine": MACHINE, **options}
    with mock.patch("zerofx.driver.shardings.Prices", return_value=DEAR_MEMORY) if rings else contextlib.nullcontext():
        step = zerofx.compile(model, optimizer, 3, **options)
        losses = [step(batch).clone() for batch in batches(num_steps)]
    decided = [d for d in step.plan.shardings if "attention" in d.node and "backward" not in d.node]
    handed = all(d.inputs[1].startswith("S2") for d in decided)  # keys
    state = step.full_state_dict()
    step.close()
    whole, optimizer = build()
    expected = []
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss = whole(batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    pairs = [*zip(losses, expected, strict=True), *((state[name], t) for name, t in whole.state_dict().items())]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return worst, bool(decided) and all(d.outputs[0].startswith("S2") for d in decided if d.outputs[0]), handed


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rings", [False, True])
def test_two_ranks_train_on_a_sequence_as_one_process(rings: bool) -> None:
    for worst, by_tokens, handed in run_ranks(_differences, 2, rings, 5, {}):
        assert by_tokens
        assert handed == rings
        assert worst < 1e-5


def _in_float64() -> float:
    torch.set_default_dtype(torch.float64)
    return _differences(True, 2, {})[0]


def test_what_a_ring_joins_has_the_digits_of_its_values() -> None:
    assert all(worst < 1e-14 for worst in run_ranks(_in_float64, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("options", [{}, {"backend": "inductor"}, {"recompute": "full"}])
def test_four_ranks_train_on_a_sequence_as_one_process(rings: bool, options: dict[str, Any]) -> None:
    for worst, by_tokens, handed in run_ranks(_differences, 4, rings, 20, options):
        assert by_tokens
        assert handed == rings
        assert worst < (1e-4 if options.get("backend") else 1e-5)
