"""One rank of eight on a GPU, whose collectives move nothing: its peaks, and its launches with graphs and without."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.fake_group import one_rank_of

pytestmark = pytest.mark.gpu


def _step(stage: int, **options: Any) -> tuple[zerofx.Step, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(vocab=32768, dim=1024, depth=8, heads=16, block=512).cuda()
    ids = torch.randint(0, 32768, (4, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofx.compile(model, optimizer, stage, precision="bf16", backend="eager", **options), ids


@pytest.mark.filterwarnings("ignore:.*not finite:zerofx.ZeroFXWarning")  # memory that nothing has been gathered into
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_allocator_s_peak_of_a_rank_of_eight_is_the_plan_s(stage: int) -> None:
    with one_rank_of(8):
        step, ids = _step(stage)
        step(ids, ids)
        measured = step.measure(ids, ids, num_steps=2).peak_bytes["device"]
        planned = step.plan.peak_bytes["device"]
        step.close()
    assert 0.95 * planned < measured <= 1.02 * planned


def test_collectives_between_graphs_cost_less_than_launches_one_by_one() -> None:
    seconds = {}
    with one_rank_of(8):
        for graphs in (False, True):
            step, ids = _step(3, cuda_graphs=graphs)
            for _ in range(4):
                step(ids, ids)
            assert (step.launches.num_graphs > 0) == graphs
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(10):
                step(ids, ids)
            issued = time.perf_counter() - begun
            torch.cuda.synchronize()
            seconds[graphs] = issued / 10
            step.close()
    print(f"issued in {1e3 * seconds[False]:.2f} ms one by one, {1e3 * seconds[True]:.2f} ms as graphs")
    assert seconds[True] < seconds[False]
