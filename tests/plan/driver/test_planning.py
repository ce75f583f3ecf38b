"""What a planned step says of itself."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.devices import products_in_tf32
from zerofx.choices import Backend
from zerofx.driver.asked import machine_at_hand
from zerofx.options import check_options
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.cost.cpu import kernel_memory

SIZE, TOKENS = 4096, 8192
H100 = zerofx.Machine.named("h100-sxm")


class Mixed(nn.Module):
    """Linear layers, each in a dtype of its own."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype))
        return x.float().square().mean()


def _planned(*dtypes: torch.dtype) -> zerofx.PlannedStep:
    with torch.device("meta"):
        model, x = Mixed(*dtypes), torch.empty(TOKENS, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zerofx.plan(model, optimizer, (x,), machine=H100, backend="eager")


def test_what_cannot_be_planned_is_refused() -> None:
    model, batch = Mixed(torch.float32).to("meta"), (torch.empty(2, SIZE, device="meta"),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: tuple[tuple[Any, ...], ...] = (
        (None, optimizer, batch, "an nn.Module, found NoneType"),
        (Mixed, optimizer, batch, "an nn.Module, found type"),
        (model, torch.optim.SGD, batch, "a torch.optim.Optimizer .* found type"),
        (model, optimizer, batch[0], "batch to be a tuple or a dict of keywords, found Tensor"),
        (model, optimizer, None, "batch to be a tuple or a dict of keywords, found NoneType"),
    )
    for *training, message in arguments:
        with pytest.raises(zerofx.ZeroFXError, match=message):
            zerofx.plan(*training)
    with pytest.raises(zerofx.UsageError, match="world_size to be a number of ranks, 1 or more, found '2'"):
        zerofx.plan(model, optimizer, batch, world_size="2")  # type: ignore[arg-type]  # that is the point
    assert zerofx.plan(model, optimizer, batch, machine=None).machine.name == H100.name


@pytest.mark.parametrize("num_float32", range(5))
def test_each_product_is_measured_against_the_peak_of_its_own_dtype(num_float32: int) -> None:
    dtypes = [torch.float32] * num_float32 + [torch.bfloat16] * (4 - num_float32)
    planned = _planned(*dtypes)
    peak = H100.device.peak
    assert peak.bfloat16 is not None
    seconds = [2 * TOKENS * SIZE**2 / (peak.float32 if dtype is torch.float32 else peak.bfloat16) for dtype in dtypes]
    # Forward, and the gradients of input and weight; the first input needs none.
    busy = 3 * sum(seconds) - seconds[0]
    assert planned.flops_utilisation == pytest.approx(busy / planned.plan.step_seconds)
    assert 0.3 < planned.flops_utilisation <= H100.efficiency.matmul
    assert f"{100 * planned.flops_utilisation:.1f} % of peak FLOP/s" in str(planned)


def test_all_micro_batches_count_for_the_part_of_the_peak() -> None:
    model = torch.nn.Linear(SIZE, SIZE, bias=False)
    optimizer, batch = torch.optim.SGD(model.parameters()), (torch.ones(8 * TOKENS, SIZE), torch.ones(8 * TOKENS, SIZE))
    planned = zerofx.plan(model, optimizer, batch, loss_fn=torch.nn.MSELoss(), accumulate=8)
    seconds = 2 * 8 * 2 * TOKENS * SIZE**2 / H100.device.peak.float32  # forward, and the weight's gradient
    assert planned.flops_utilisation == pytest.approx(seconds / planned.plan.step_seconds)


def test_products_in_float32_run_on_tf32_where_the_program_allows_it() -> None:
    exact = _planned(torch.float32, torch.bfloat16)
    with products_in_tf32():
        allowed = _planned(torch.float32, torch.bfloat16)
    peak = H100.device.peak
    assert peak.tf32 is not None
    # Forward, and the gradient of the weight: the first input needs none.
    saved = 2 * 2 * TOKENS * SIZE**2 * (1 / peak.float32 - 1 / peak.tf32) / H100.efficiency.matmul
    assert exact.plan.step_seconds - allowed.plan.step_seconds == pytest.approx(saved, rel=0.02)
    assert allowed.machine == replace(H100.for_ranks(1), allows_tf32=True)


def test_ranks_that_are_not_there_take_no_part_of_the_host() -> None:
    with torch.device("meta"):
        model, x = Mixed(*[torch.float32] * 6), torch.empty(8, SIZE)
    states = 6 * 2 * 4 * SIZE**2  # Adam's

    def planned(machine: zerofx.Machine) -> zerofx.PlannedStep:
        optimizer = torch.optim.Adam(model.parameters())
        return zerofx.plan(model, optimizer, (x,), machine=machine, backend="eager", memory_budget=states)

    alone = planned(replace(H100, host=replace(H100.host, memory_bytes=6 * states)))
    an_eighth = planned(replace(H100, host=replace(H100.host, memory_bytes=6 * states // 8), ranks_per_node=1))
    assert alone.plan.peak_bytes["host"] > 6 * states // 8
    assert "nvme" not in alone.plan.peak_bytes
    assert "nvme" in an_eighth.plan.peak_bytes
    assert alone.fits and alone.machine.ranks_per_node == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_this_cpus_kernels_hold_is_no_part_of_a_plan_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 7), nn.ReLU(), nn.Conv2d(64, 8, 3), nn.Flatten())
        images = torch.empty(8, 3, 64, 64)

    def planned(machine: zerofx.Machine) -> zerofx.PlannedStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return zerofx.plan(
            model, optimizer, (images,), machine=machine, backend=backend, loss_fn=lambda y, x: y.square().mean()
        )

    calls = []
    learn = kernel_memory._learn

    def noted(fresh: Any) -> None:
        calls.extend(fresh)
        learn(fresh)

    kernel_memory._memory_cache.cache_clear()
    monkeypatch.setattr(kernel_memory, "_learn", noted)
    on_gpu = planned(H100)
    assert not calls
    on_cpu = planned(zerofx.Machine.measure("cpu"))
    assert calls
    assert on_gpu.plan.peak_bytes["device"] < on_cpu.plan.peak_bytes["device"]


def test_a_step_alone_on_a_machine_has_all_of_its_host() -> None:
    machine = zerofx.Machine.named("cpu")
    control = Control(None, 1.0)
    with closing(control):
        at_hand = machine_at_hand(torch.device("cpu"), check_options(stage=0, machine=machine), control)
    assert machine.ranks_per_node == 2
    assert at_hand == machine.for_ranks(1)
