"""One step of zerofx: what its plan predicts, and what is measured of it.

    python -m benchmarks.gpu.step_worker '{"shape": "llama-1b", "backend": "inductor", "device": "cuda", ...}' FOLDER

Optional: ``changes`` to the shape, ``budget`` and ``host_budget`` in bytes, ``machine`` as ``Machine.to_json`` has it.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zerofx
from benchmarks.gpu.case import Answers
from benchmarks.lib.models import SHAPES, Workload, make_workload
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.cost.machine import Machine

NUM_STEPS = 5
# Of torch.cuda.memory_stats: what is asked for before rounding, and what cannot be used in blocks that were split.
STATS = ("requested_bytes.all.peak", "inactive_split_bytes.all.peak", "num_alloc_retries", "num_ooms")


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    device = torch.device(request["device"])
    shape = replace(SHAPES[request["shape"]], **request.get("changes", {}))
    work = make_workload(shape, device, getattr(torch, request["dtype"]))
    began = time.perf_counter()
    try:
        step = zerofx.compile(
            work.model,
            torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True),
            memory_budget=request.get("budget"),
            host_budget=request.get("host_budget"),
            machine=Machine.from_json(request["machine"]) if request.get("machine") else None,
            backend=request["backend"],
            example_batch=work.batch,
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
    step(**work.batch)
    first_seconds = time.perf_counter() - began
    step(**work.batch)
    if device.type == "cuda":
        answers.add(**allocator_peaks(step, work, device))
    seconds = [timed(step, work, device) for _ in range(NUM_STEPS)]
    answers.add(seconds=seconds, first_seconds=first_seconds)
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


def allocator_peaks(step: zerofx.Step, work: Workload, device: torch.device) -> dict[str, Any]:
    """Bytes of one step by the caching allocator: the most allocated and reserved, what is allocated and what the step
    holds before it, and what the driver says is taken of the device after it, by this process and others."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = step.tiers()["device"]
    step(**work.batch)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "before_bytes": before,
        "held_bytes": held,
        "driver_bytes": total - free,
        "allocator": {name: stats.get(name, 0) for name in STATS},
    }


if __name__ == "__main__":
    main()
