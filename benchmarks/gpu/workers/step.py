"""One step of zerofx: what its plan predicts, and what is measured of it.

    python -m benchmarks.gpu.workers.step '{"shape": "llama-1b", "backend": "inductor", "device": "cuda", ...}' FOLDER

Optional: ``changes`` to the shape, ``budget`` and ``host_budget`` in bytes, other ``options`` of ``zerofx.compile``;
``measured``: planned for what ``Machine.measure()`` says of this machine and of the folder ``drive``.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zerofx
from benchmarks.gpu.case import Answers
from benchmarks.lib.models import SHAPES, Workload, make_workload
from benchmarks.lib.turn import turn
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.cost.machine import Machine

NUM_STEPS = 5
# Of torch.cuda.memory_stats: what is asked for before rounding, and what cannot be used in blocks that were split.
STATS = ("requested_bytes.all.peak", "inactive_split_bytes.all.peak", "num_alloc_retries", "num_ooms")


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    device = torch.device(request["device"])
    shape = replace(SHAPES[request["shape"]], **request.get("changes", {}))
    machine = None
    if request.get("measured"):
        with turn(whole_machine=True):
            machine = Machine.measure(device, nvme_path=request["drive"])
    on_card = card_bytes(device)
    with turn():  # values are drawn on the device
        work = make_workload(shape, device, getattr(torch, request["dtype"]))
    began = time.perf_counter()
    try:
        step = zerofx.compile(
            work.model,
            torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True),
            memory_budget=request.get("budget"),
            host_budget=request.get("host_budget"),
            machine=machine,
            backend=request["backend"],
            example_batch=work.batch,
            **request.get("options", {}),
        )
    except MemoryBudgetError as error:
        answers.add(refused=str(error))
        return
    plan = step.plan
    answers.add(
        budget=request.get("budget"),
        predicted_bytes=plan.peak_bytes,
        predicted_seconds=plan.step_seconds,
        predicted_exposed_seconds=plan.exposed_seconds,
        num_recomputed=len(plan.recomputes),
        link_bytes=plan.link_bytes,
        num_regions=step.num_regions,
        ready_seconds=time.perf_counter() - began,
    )
    with turn():
        began = time.perf_counter()
        step(**work.batch)
        first_seconds = time.perf_counter() - began
        step(**work.batch)
        if device.type == "cuda":
            answers.add(**allocator_peaks(step, work, device), card_bytes=card_bytes(device) - on_card)
    # Links and the host are shared with whoever else would use them.
    with turn(whole_machine=sum(plan.link_bytes.values()) > 0):
        step(**work.batch)
        before = gpu_state()
        seconds = [timed(step, work, device) for _ in range(NUM_STEPS)]
        answers.add(
            seconds=seconds, first_seconds=first_seconds, threads=torch.get_num_threads(),
            gpu_before=before, gpu_after=gpu_state(),
        )  # fmt: skip
        measured = step.measure(num_steps=2, **work.batch)
    answers.add(
        measured_bytes=measured.peak_bytes,
        exposed_seconds=measured.exposed_seconds,
        between_seconds=measured.between_seconds,
        measured_seconds=measured.step_seconds,
    )


def timed(step: zerofx.Step, work: Workload, device: torch.device) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    step(**work.batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def card_bytes(device: torch.device) -> int:
    """What is taken of the whole card, by this process and others."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def gpu_state() -> str:
    """Clock, power and temperature of the GPU, as ``nvidia-smi`` has them; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def allocator_peaks(step: zerofx.Step, work: Workload, device: torch.device) -> dict[str, Any]:
    """Bytes of one step by the caching allocator: the most allocated and reserved, what is allocated and what the step
    holds before it."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = step.tiers()["device"]
    step(**work.batch)
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "before_bytes": before,
        "held_bytes": held,
        "allocator": {name: stats.get(name, 0) for name in STATS},
    }


if __name__ == "__main__":
    main()
