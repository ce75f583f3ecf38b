"""Buffers that one step changes and the next, of another mode or batch shape, only reads, on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world


@pytest.mark.filterwarnings("ignore:a batch of another shape")
def test_statistics_that_a_step_only_reads_are_those_of_distributed_data_parallel() -> None:
    for rank, wrong in enumerate(run_ranks(_unlike_eager_mode, 2)):
        assert wrong == [], f"rank {rank}"


def _unlike_eager_mode() -> list[str]:
    (expected, plain), (losses, model) = _trained(compiled=False), _trained(compiled=True)
    wrong = [f"loss {n}: {a} {b}" for n, (a, b) in enumerate(zip(expected, losses, strict=True)) if not a.equal(b)]
    return wrong + [name for name, value in plain.items() if not value.equal(model[name])]


def _trained(*, compiled: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = zerofx.compile(model, optimizer, loss_fn=nn.MSELoss(), backend="eager") if compiled else None
    runner = model if compiled else DistributedDataParallel(model)
    draw, losses = torch.Generator().manual_seed(world()[0]), []
    for trains in (True, True, False, False, True):
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
