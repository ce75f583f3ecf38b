"""A step's memory on a GPU that is not the current one, and pinned memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.scheduler.cost.transfers import PAGE

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_trains_on_a_device_that_is_not_the_current_one(backend: Any) -> None:
    before = torch.cuda.memory_allocated(0)
    with torch.device("cuda:1"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64))
        x = torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = zerofx.compile(
        model, optimizer, 0, loss_fn=lambda y, x: (y - torch.ones((), device=y.device)).square().mean(), backend=backend
    )
    first, *_, last = (float(step(x)) for _ in range(20))
    assert last < first
    assert torch.cuda.memory_allocated(0) == before


def test_torch_takes_a_block_for_pinned_memory() -> None:
    memory = HostMemory(pinned=True)
    block = memory.take(3 * PAGE)
    assert block.is_pinned()
    on_device = torch.arange(3 * PAGE, device="cuda").to(torch.uint8)
    block.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(block, on_device.cpu())


def test_a_deferred_model_takes_batches_of_the_current_device() -> None:
    with zerofx.empty_init(), torch.device("cuda"):
        model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zerofx.compile(model, optimizer, 0, loss_fn=lambda y, x: y.square().mean(), backend="eager")
    x = torch.randn(4, 8, device="cuda")
    first, *_, last = (float(step(x)) for _ in range(5))
    assert last < first
