"""One rank of one contender of ``benchmarks/peers/``, a process of its own.

    python -m benchmarks.peers.worker '{"shape": "27m", "device": "cpu", "dtype": "float32", "contender": {...}}'

Builds its step, prints what it took as a line of JSON, and then runs as many steps as each line on stdin says,
answering with the seconds and the CPU seconds of each. Every contender is measured by the same code. The default
process group is joined through ``RANK``, ``WORLD_SIZE`` and the file ``STORE``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lib.models import SHAPES, make_workload, model_flops
from benchmarks.lib.processes import high_water_bytes
from benchmarks.lib.turn import turn
from benchmarks.lib.wire_count import WireCount
from benchmarks.peers.contenders import TrainStep, build, ranks_per_batch
from zerofx.scheduler.cost.cpu.peaks import CpuPeak

_NEED_A_GROUP = ("ddp", "fsdp2", "deepspeed", "dtensor")  # also where it has one member


def main() -> None:
    # Libraries write to stdout what they like; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    device = join(request["device"], alone=request["contender"]["family"] not in _NEED_A_GROUP)
    shape = SHAPES[request["shape"]]
    num_model = ranks_per_batch(request["contender"], int(os.environ["WORLD_SIZE"]))
    work = make_workload(shape, device, getattr(torch, request["dtype"]), int(os.environ["RANK"]) // num_model)
    num_parameters = sum(p.numel() for p in work.model.parameters())
    began = time.perf_counter()
    try:
        step = build(request["contender"], work, device)
        _hold_to(request["contender"].get("cap"), device)
        step.run()
    except zerofx_errors() as error:
        answers.write(json.dumps({"refused": str(error)}) + "\n")
        return
    facts: dict[str, Any] = {"ready_seconds": time.perf_counter() - began}
    # Ranks of one contender meet in collectives: the first of them asks for all.
    with turn() if os.environ["RANK"] == "0" else contextlib.nullcontext():
        facts["loss"] = float(step.run().mean())
        facts |= _measure(step, device) | step.facts
    facts |= {"shape": asdict(shape), "num_parameters": num_parameters, "ranks_per_batch": num_model}
    facts.setdefault("num_batches", int(os.environ["WORLD_SIZE"]) // num_model)
    num_flops = request["contender"].get("accumulate", 1) * model_flops(shape, num_parameters)
    share = 1 / 3 if request["contender"].get("evaluate") else 1.0  # a backward takes twice its forward's
    facts.setdefault("flops", share * num_flops / num_model)
    answers.write(json.dumps(facts) + "\n")
    for line in sys.stdin:
        meet()
        seconds = [_timed(step, device) for _ in range(int(line))]
        answers.write(json.dumps(seconds) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def zerofx_errors() -> tuple[type[Exception], ...]:
    """What a contender may answer instead of a step."""
    from zerofx.errors import MemoryBudgetError

    return (MemoryBudgetError,)


def _hold_to(cap_bytes: int | None, device: torch.device) -> None:
    """From here on a CUDA device has no more memory than ``cap_bytes`` for this process."""
    if cap_bytes is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / whole), device)


def join(kind: str, *, alone: bool) -> torch.device:
    """This rank's device; the process group of all, where there are several or it is not to be ``alone``."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if num_ranks > 1 or not alone:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            init_method=Path(os.environ["STORE"]).as_uri(),
            rank=rank,
            world_size=num_ranks,
        )
    return device


def meet() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def _timed(step: TrainStep, device: torch.device) -> tuple[float, float]:
    """Seconds and CPU seconds of all threads of one step."""
    began, began_cpu = time.perf_counter(), time.process_time()
    step.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, time.process_time() - began_cpu


def _measure(step: TrainStep, device: torch.device) -> dict[str, int | None]:
    """Bytes of one step on this rank: the most that is allocated, what is held between steps, the most that is resident
    (since the step was ready), and what is sent to other ranks."""
    gc.collect()
    meet()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        is_new = _forget_resident_peak()
        step.run()
        torch.cuda.synchronize(device)
        bytes_of = {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "held_bytes": held,
            "resident_bytes": high_water_bytes() if is_new else None,
        }
        return {**bytes_of, "wire_bytes": _sent_bytes(step)}
    is_new = _forget_resident_peak()
    sent = _written_bytes()
    step.run()
    sent = _written_bytes() - sent
    resident = high_water_bytes() if is_new else None
    if step.sent_bytes is not None:
        sent = step.sent_bytes()
    held = _held_bytes() + step.hidden_bytes
    meet()
    with CpuPeak() as peak:
        step.run()
    return {
        "peak_bytes": held + peak.num_bytes,
        "held_bytes": held,
        "resident_bytes": resident,
        "wire_bytes": sent if dist.is_initialized() else 0,
    }


def _sent_bytes(step: TrainStep) -> int:
    """Bytes that NCCL's collectives send in a step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    wire = WireCount(dist.get_world_size())
    with wire:
        step.run()
    return wire.num_bytes


def _forget_resident_peak() -> bool:
    """The high-water mark of resident memory starts anew; False where the kernel has no way to ask for that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _held_bytes() -> int:
    """Bytes of the distinct CPU storages that Python's tensors name."""
    plain = (torch.Tensor, nn.Parameter)
    storages = {}
    for held in gc.get_objects():
        if type(held) in plain and held.device.type == "cpu":
            storage = held.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _written_bytes() -> int:
    """Bytes that this process has written so far, to sockets above all: gloo's connections are such."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


if __name__ == "__main__":
    main()
