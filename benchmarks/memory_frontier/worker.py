"""One contender of ``benchmarks/memory_frontier/`` in a process of its own.

    python -m benchmarks.memory_frontier.worker '{"shape": {...}, "device": "cpu", "contender": {...}}'

Builds its training step, prints what it took as a line of JSON, and then runs as many steps as each line on stdin says,
answering with the seconds and the CPU seconds of each. Every contender is measured by the same code: memory by the
profiler's record of allocations (the caching allocator's on CUDA), from a moment at which only parameters, optimizer
states and the batch are there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.peers.contenders import Checkpointed
from gpt import GPT
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.cost.cpu.peaks import CpuPeak, CudaPeak
from zerofx.scheduler.search.problem import BudgetMissedError

TrainStep = Callable[[], Any]


def make_model(shape: dict[str, int], device: torch.device) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The GPT with an output layer of its own, and a batch."""
    torch.manual_seed(0)
    with device:
        model = GPT(shape["vocab"], shape["dim"], shape["depth"], shape["heads"], shape["sequence"])
        ids = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def build_peer(model: GPT, batch: tuple[Tensor, Tensor], contender: dict[str, Any]) -> tuple[TrainStep, TrainStep]:
    """``torch.compile`` with the memory option asked for: its whole step, and its forward and backward alone."""
    if contender.get("checkpoint"):
        model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.layers)
    if "budget" in contender:
        torch._functorch.config.activation_memory_budget = contender["budget"]
        torch._functorch.config.activation_memory_budget_solver = contender["solver"]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model)

    def passes() -> None:
        compiled(*batch).backward()

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, passes


def build_ours(
    model: GPT, batch: tuple[Tensor, Tensor], contender: dict[str, Any]
) -> tuple[TrainStep, dict[str, float]]:
    """A zerofx step within a budget above what is persistent; ``"least"`` is the least budget that can be met."""
    optimizer = torch.optim.AdamW(model.parameters())
    on_cpu = batch[0].device.type == "cpu"
    # What is persistent is the same on any GPU; predictions are for the one at hand.
    free = zerofx.plan(model, optimizer, batch, machine="cpu" if on_cpu else "h100-sxm").lowered.simulation.live
    machine = "cpu" if on_cpu else None
    asked = contender.get("budget")
    budget = None if asked is None else 1 if asked == "least" else free.persistent_bytes + int(asked * 1e6)
    while True:
        try:
            step = zerofx.compile(
                model, optimizer, example_batch=batch, machine=machine, memory_budget=budget, offload="none"
            )
            break
        except BudgetMissedError as error:
            if asked != "least" or error.least_bytes <= (budget or 0):
                raise
            budget = error.least_bytes
    predicted = step.plan.peak_bytes["device"] - step.compiled.lowered.simulation.live.persistent_bytes
    return lambda: step(*batch), {"predicted_bytes": predicted, "recomputed": len(step.plan.recomputes)}


def measure_peak(function: TrainStep, device: torch.device) -> int:
    with CpuPeak() if device.type == "cpu" else CudaPeak(device) as peak:
        function()
    return peak.num_bytes


def main() -> None:
    request = json.loads(sys.argv[1])
    contender = request["contender"]
    device = torch.device(request["device"])
    model, batch = make_model(request["shape"], device)
    began = time.perf_counter()
    facts: dict[str, Any] = {}
    if contender["family"] == "zerofx":
        try:
            step, facts = build_ours(model, batch, contender)
        except MemoryBudgetError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        step()
        step()
        facts["peak_bytes"] = measure_peak(step, device)
    else:
        step, passes = build_peer(model, batch, contender)
        try:
            step()
        except (RuntimeError, ImportError) as error:  # a solver may want a package, or refuse the graph
            print(json.dumps({"refused": f"{type(error).__name__}: {error}"}), flush=True)
            return
        step()
        facts["peak_bytes"] = measure_peak(passes, device)
        for parameter in model.parameters():
            parameter.grad = None
    facts["compile_seconds"] = time.perf_counter() - began
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began, began_cpu = time.perf_counter(), time.process_time()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append((time.perf_counter() - began, time.process_time() - began_cpu))
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
