"""A step's kernels launched as CUDA graphs train the same bits within the memory of launches one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.models import CASES
from tests.lib.training import Trained, differences, train_compiled
from zerofx.runtime.cuda_graphs.graphed import NUM_WARM_UP_STEPS

pytestmark = pytest.mark.gpu


def _on_cuda(name: str, backend: str, *, graphs: bool) -> Trained:
    case, device = CASES[name], torch.device("cuda")

    def batch(generator: torch.Generator) -> Any:
        args, kwargs = case.batch(generator)
        return tuple(one.to(device) for one in args), {key: one.to(device) for key, one in kwargs.items()}

    moved = replace(case, model=lambda: case.model().to(device), batch=batch)
    torch.cuda.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward adds in any order otherwise
    try:
        return train_compiled(moved, 0, 6, backend=backend, cuda_graphs=graphs)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["gpt", "batchnorm", "dropout"])
def test_cuda_graphs_train_the_same_bits(name: str, backend: str) -> None:
    one_by_one, graphed = (_on_cuda(name, backend, graphs=graphs) for graphs in (False, True))
    assert differences(one_by_one, graphed) == []


def test_graphs_hold_what_the_step_held_at_its_peak() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step = zerofx.compile(model, optimizer, 0, loss_fn=lambda y, x: y.square().mean(), cuda_graphs=True)
    x = torch.randn(4096, 1024, device="cuda")
    for _ in range(NUM_WARM_UP_STEPS):
        step(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    step(x)
    assert step.launches.num_graphs
    peak = step.plan.peak_bytes["device"] - step.tiers()["device"]
    # The allocator takes memory in blocks of 20 MiB.
    assert torch.cuda.memory_reserved() - before <= 1.1 * peak + 64 * 2**20
