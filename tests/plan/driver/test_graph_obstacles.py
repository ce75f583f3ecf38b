"""What keeps a step from being launched as CUDA graphs is found in its plan and graph, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import plan_of
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.runtime.cuda_graphs.obstacles import batch_bytes, machine_obstacle, step_obstacle

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def lowered(model: nn.Module, *batch: Tensor, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    asked = {"stage": 0, "machine": "h100-sxm", "backend": "eager", **options}
    return zerofx.plan(model, optimizer, batch, **asked).lowered


def gpt(**options: Any) -> Any:
    with torch.device("meta"):
        model = GPT(vocab=64, dim=64, depth=4, heads=2, block=32)
        ids = torch.zeros(4, 32, dtype=torch.int64)
    return lowered(model, ids, ids, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"stage": 3, "world_size": 8}, {"accumulate": 2, "precision": "bf16"}])
def test_nothing_is_in_the_way_of_a_plain_step(options: dict[str, Any]) -> None:
    found = gpt(**options)
    assert step_obstacle(found, GPU, None) == ""


def test_tensors_in_slower_tiers_are() -> None:
    peak = gpt().plan.peak_bytes["device"]
    found = gpt(memory_budget=int(0.7 * peak), recompute="none", offload="host")
    assert found.plan.slower_peak_bytes
    assert "slower tiers, which the host copies and updates" in step_obstacle(found, GPU, None)


def test_values_in_few_bits_are() -> None:
    found = gpt(stage=3, world_size=16, wire="int8", memory_budget=None)
    assert found.plan.wires, "the plan sends something in few bits"
    assert "in few bits" in step_obstacle(found, GPU, None)


def test_values_that_ranks_share_are() -> None:
    found = plan_of("stack", stage=0, mesh={"model": 2}, machine=SHARING).lowered
    assert VALUE_COLLECTIVES & {node.target for node in found.graph.calls()}
    assert "ranks share what layers compute" in step_obstacle(found, CPU, None)


def test_a_budget_without_room_for_a_copy_of_the_batch_is() -> None:
    found = gpt()
    peak = found.plan.peak_bytes["device"]
    assert batch_bytes(found) == 2 * 4 * 32 * 8
    assert step_obstacle(found, GPU, peak + 2048) == ""
    assert "need 2.0 KiB for copies of the batch" in step_obstacle(found, GPU, peak + 2047)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y: Tensor = self.linear(x).clone()
        y.index_put_((index,), y.new_zeros(4))
        return y.sum()


def test_a_mask_is_counted_by_the_host_and_numbers_are_not() -> None:
    x = torch.ones(6, 4)
    assert step_obstacle(lowered(Masking(), x, torch.tensor([1, 2])), GPU, None) == ""
    found = step_obstacle(lowered(Masking(), x, x[:, 0] > 0), GPU, None)
    assert found.startswith("the host waits for a value that the device computes (") and "index_put" in found


def test_what_is_on_another_device_is_named() -> None:
    assert step_obstacle(gpt(), CPU, None).endswith("is not on the device")


def test_machines_without_cuda_have_no_graphs() -> None:
    assert machine_obstacle(CPU) == "the model is on cpu, and only CUDA has graphs"
    assert machine_obstacle(torch.device("mps")) == "the model is on mps, and only CUDA has graphs"
