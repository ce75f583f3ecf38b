"""Models for plans within a budget, what their plans take at least and at most, and their training within one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.chains import Stack
from zerofx.capture.trace import Batch, capture
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.machine import Device, Link, Machine
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.problem import BudgetMissedError


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


class Chain(Stack):
    def __init__(self, dim: int, names: tuple[str, ...], depth: int) -> None:
        super().__init__(*(Layer(dim, names) for _ in range(depth)))


WAVE_WIDTH = 64


class Waves(Stack):
    """Linear layers with what is cheap to compute again between them."""

    def __init__(self) -> None:
        super().__init__(*(Wave() for _ in range(3)))


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WAVE_WIDTH, WAVE_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.cos(torch.tanh(self.linear(x))))


def captured_gpt(num_layers: int = 2, num_ranks: int = 1) -> tuple[StepGraph, BucketLayout]:
    """A larger GPT without values, in bfloat16 with masters, and its buckets on ``num_ranks`` ranks. The graph is
    captured once: nobody changes it."""
    step = _captured_gpt(num_layers)
    return step, layout_of(step, {p.name: 0 for p in step.parameters}, Mesh(shard=num_ranks))


@functools.cache
def _captured_gpt(num_layers: int) -> StepGraph:
    with torch.device("meta"):
        model = GPT(512, 512, num_layers, 8, 128)
        ids = torch.zeros(1, 128, dtype=torch.long)
    return capture(model, Batch.from_call((ids, ids), {}), compute_dtype=torch.bfloat16)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    ids = torch.randint(32, (4, 33))
    return GPT(32, 32, 3, 4, 32), (ids[:, :-1], ids[:, 1:])


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(3, 32, (4, 32))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def encoder_decoder() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    ids = torch.randint(3, 32, (4, 32))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def convnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
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


def small_machine(link: float) -> Machine:
    """A device so slow, with launches so cheap, that tiny tensors are worth moving over a link of ``link`` bytes/s."""
    device = Machine.named("h100-sxm").device
    slow = Device(replace(device.peak, float32=2e9), 2e9, device.memory_bytes, 1e-9)
    host = replace(Machine.named("h100-sxm").host, to_host=Link(link, 1e-9), to_device=Link(link, 1e-9))
    return replace(Machine.named("h100-sxm"), name="small", device=slow, host=host)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def planned(
    model: nn.Module,
    batch: Any,
    memory_budget: int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> zerofx.Plan:
    """The plan within a budget of bytes, or without one; on the CPU by the eager backend unless ``options`` differ."""
    given = {"machine": "cpu", "backend": "eager", **options}
    if optimizer is None:
        foreach = False if given["backend"] == "eager" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    return zerofx.plan(model, optimizer, batch, memory_budget=memory_budget, **given).plan


def least_bytes(model: nn.Module, batch: Any, **options: Any) -> int:
    """The least budget that a refusal calls possible."""
    with pytest.raises(BudgetMissedError) as refused:
        planned(model, batch, 1, **options)
    return refused.value.least_bytes


def least_and_most(model: nn.Module, batch: Any, **options: Any) -> tuple[int, int]:
    """The least budget that is possible, and the peak without one; bytes."""
    return least_bytes(model, batch, **options), planned(model, batch, **options).peak_bytes["device"]


def run(step: Callable[..., Tensor], batch: tuple[Any, ...] | Mapping[str, Any]) -> Tensor:
    return step(**batch) if isinstance(batch, Mapping) else step(*batch)


def trained(model: nn.Module, batch: Any, num_steps: int = 3, **options: Any) -> tuple[zerofx.Step, list[Tensor]]:
    """A step that has trained a copy of ``model``; its losses, and whole parameters and buffers at the end."""
    ours = copy.deepcopy(model)
    step = zerofx.compile(ours, adamw(ours), backend="eager", **options)
    losses = [run(step, batch) for _ in range(num_steps)]
    with step.full_parameters():
        return step, [*losses, *(tensor.detach().clone() for tensor in (*ours.parameters(), *ours.buffers()))]


def trained_by_torch(model: nn.Module, batch: Any, num_steps: int = 3) -> list[Tensor]:
    """What ``trained`` gives, of plain training."""
    ours, losses = copy.deepcopy(model), []
    optimizer = adamw(ours)
    for _ in range(num_steps):
        loss = run(ours, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in ours.parameters()), *ours.buffers()]


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
