"""A step's kernels launched as CUDA graphs train the same bits within the memory of launches one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.devices import deterministic, moved
from tests.lib.models import CASES
from tests.lib.runs.training import Trained, differences, train_compiled
from zerofx.runtime.cuda_graphs.graphed import NUM_WARM_UP_STEPS

pytestmark = pytest.mark.gpu


def _on_cuda(name: str, backend: str, *, graphs: bool) -> Trained:
    torch.cuda.manual_seed(0)
    with deterministic():
        return train_compiled(moved(CASES[name], torch.device("cuda")), 0, 6, backend=backend, cuda_graphs=graphs)


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
