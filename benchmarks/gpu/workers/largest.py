"""A Llama of some layers trains two steps, or says why it does not.

python -m benchmarks.gpu.workers.largest '{"shape": "llama-8b", "changes": {"depth": 64}, "tier": "host", ...}' FOLDER
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.gpu.case import Answers
from benchmarks.lib.models import SHAPES, Shape, Workload, make_batch, make_model, make_workload
from benchmarks.lib.processes import high_water_bytes
from benchmarks.lib.turn import turn
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.cost.catalog import find_machine, machine_of_device
from zerofx.scheduler.cost.machine import Machine

NUM_STEPS = 2


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def plain(work: Workload) -> Callable[[], Tensor]:
    """A step of eager torch."""
    optimizer = adamw(work.model)

    def step() -> Tensor:
        loss = work.loss(work.model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def machine_of(request: dict[str, Any], device: torch.device) -> Machine:
    """The row of the device with the host memory and the drive that are here."""
    row = find_machine("cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row = machine_of_device(properties.name, properties.total_memory) or find_machine("h100-sxm")
        row = replace(row, device=replace(row.device, memory_bytes=properties.total_memory))
    host = replace(row.host, memory_bytes=request["host_budget"])
    drive = replace(row.nvme, num_bytes=request["drive_bytes"]) if row.nvme and request["drive_bytes"] else None
    return replace(row, host=host, nvme=drive)


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    shape = replace(SHAPES[request["shape"]], **request["changes"])
    num_parameters = sum(p.numel() for p in make_model(shape, torch.device("meta"), dtype).parameters())
    answers.add(num_parameters=num_parameters, num_layers=shape.depth)
    began = time.perf_counter()
    try:
        step = make_step(request, shape, device, dtype, answers)
        answers.add(ready_seconds=time.perf_counter() - began)
        tokens = request.get("accumulate", 1) * shape.sequences * shape.tokens
        with turn(whole_machine=True):
            train(step, device, tokens, answers)
    except (torch.OutOfMemoryError, MemoryBudgetError) as error:
        answers.add(reason=str(error).splitlines()[0])
    answers.add(total_seconds=time.perf_counter() - began, resident_bytes=high_water_bytes())
    if device.type == "cuda":
        answers.add(
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
        )


def make_step(
    request: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype, answers: Answers
) -> Callable[[], Tensor]:
    """A step that is ready to run; zerofx's model never exists whole."""
    if request["tier"] is None:
        return plain(make_workload(shape, device, dtype))
    with zerofx.empty_init():
        model = make_model(shape, device, dtype)
    accumulate = request.get("accumulate", 1)
    batch = {name: torch.cat([tensor] * accumulate) for name, tensor in make_batch(shape, device).items()}
    step = zerofx.compile(
        model,
        adamw(model),
        memory_budget=request["budget"],
        host_budget=request["host_budget"],
        offload="host" if request["tier"] == "host" else "auto",
        machine=machine_of(request, device),
        accumulate=accumulate,
        backend="eager",
        example_batch=batch,
    )
    answers.add(predicted_bytes=step.plan.peak_bytes, predicted_seconds=step.plan.step_seconds)
    return lambda: step(**batch)


def train(step: Callable[[], Tensor], device: torch.device, num_tokens: int, answers: Answers) -> None:
    """Run the steps, and answer with the loss and the seconds of each as soon as it has ended."""
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        losses.append(float(step()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        answers.add(losses=losses, seconds=seconds, tokens_per_second=num_tokens / seconds[-1])
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"expected finite losses, found {losses}")


if __name__ == "__main__":
    main()
