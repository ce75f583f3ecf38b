"""What the model axis is tested with: a machine on which ranks share whatever they can, one process that trains as they
do, and a model with parameters in all kinds of parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpt import Attention
from tests.lib.models import DIM, Case, batches
from tests.lib.runs.training import Trained, build, world
from zerofx import Machine
from zerofx.scheduler.cost.machine import Link

# Its links cost next to nothing and its memory is slow, so that whatever can be shared is.
SHARING = replace(
    (cpu := Machine.named("cpu")),
    intra_node=Link(bandwidth=1e15, latency=1e-13),
    device=replace(cpu.device, memory_bandwidth=cpu.device.memory_bandwidth / 100),
)


def one_process(case: Case, num_data: int, steps: int, max_grad_norm: float | None = None) -> Trained:
    """Training on the batches of ``num_data`` ranks by their average, as one process does it; each step begins with the
    first rank's buffers, which rank 0 broadcasts, and what is left are this rank's.

    Each rank's gradients are divided before they are summed, as in float16, which rounds small ones by that; the
    number of ranks is a power of two, so that others are not.
    """
    model = build(case)
    optimizer = case.optimizer(model)
    own = world()[0] * num_data // world()[1]
    losses, ends = list[Tensor](), [_copied(model.buffers())]  # buffers after a step, of each rank
    for given in zip(*(batches(case, rank, steps) for rank in range(num_data)), strict=True):
        each, begin, ends, sums = list[Tensor](), ends[0], [], dict[nn.Parameter, Tensor]()
        for args, kwargs in given:
            _overwrite(model.buffers(), begin)
            outputs = model(*args, **kwargs)
            loss = case.loss_fn(outputs, *args) if case.loss_fn is not None else case.loss(outputs)
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    term = parameter.grad / num_data
                    sums[parameter] = sums[parameter] + term if parameter in sums else term
            each.append(loss.detach())
            ends.append(_copied(model.buffers()))
        for parameter, total in sums.items():
            parameter.grad = total
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(each[own])
    _overwrite(model.buffers(), ends[own])
    return Trained(losses, {name: tensor.clone() for name, tensor in model.state_dict().items()})


def _copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class Parted(nn.Module):
    """Parameters in parts by rows, by columns and by groups, tied, frozen, and lying transposed; others stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention(DIM, 4)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gate = nn.Linear(DIM, 4 * DIM, bias=False)
        self.gate.weight = self.up.weight
        self.transposed = nn.Parameter(torch.randn(3, 4 * DIM).t())
        self.frozen = nn.Parameter(torch.randn(4 * DIM, 4 * DIM) / DIM, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4 * DIM))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * self.scale
        h = torch.tanh(self.up(x)) * torch.relu(self.gate(x)) @ self.frozen
        self.seen.add_(h.detach().mean((0, 1)))
        x = self.down(h + torch.tanh(self.transposed).sum(1))
        return (x - target).square().mean()


def _sequences(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(4, 6, DIM, generator=generator), torch.randn(4, 6, DIM, generator=generator)), {}


PARTED = Case(Parted, _sequences)
