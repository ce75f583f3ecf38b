"""Buffers on several ranks: one that a step changes and the next, of another mode, only reads; one of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world


class _Noting(torch.autograd.Function):
    """Adds up, in a buffer, how large the gradients are that come by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.total.add_(gradient.abs().sum())
        return gradient, None


class _Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        noted: Tensor = _Noting.apply(x, self.get_buffer("total"))  # type: ignore[no-untyped-call]  # torch's
        return noted


@pytest.mark.filterwarnings("ignore:a batch (of|in) another")
@pytest.mark.parametrize(("kind", "modes"), [(nn.BatchNorm1d, (True, True, False, False, True)), (_Noted, (True,) * 3)])
def test_buffers_are_those_of_distributed_data_parallel(kind: type[nn.Module], modes: tuple[bool, ...]) -> None:
    for rank, wrong in enumerate(run_ranks(_unlike_eager_mode, 2, kind, modes)):
        assert wrong == [], f"rank {rank}"


def _unlike_eager_mode(kind: type[nn.Module], modes: tuple[bool, ...]) -> list[str]:
    (expected, plain), (losses, model) = (_trained(kind, modes, compiled=compiled) for compiled in (False, True))
    wrong = [f"loss {n}: {a} {b}" for n, (a, b) in enumerate(zip(expected, losses, strict=True)) if not a.equal(b)]
    return wrong + [name for name, value in plain.items() if not value.equal(model[name])]


def _trained(
    kind: type[nn.Module], modes: tuple[bool, ...], *, compiled: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), kind() if kind is _Noted else kind(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = zerofx.compile(model, optimizer, loss_fn=nn.MSELoss(), backend="eager") if compiled else None
    runner = model if compiled else DistributedDataParallel(model)
    draw, losses = torch.Generator().manual_seed(world()[0]), []
    for trains in modes:
        model.train(trains)
        x, y = torch.randn(6, 4, generator=draw), torch.randn(6, 1, generator=draw)
        if step is not None:
            losses.append(step(x, y).clone())
            continue
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(runner(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, step.full_state_dict() if step is not None else model.state_dict()
