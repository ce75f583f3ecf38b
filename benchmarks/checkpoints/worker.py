"""One rank of ``benchmarks/checkpoints/``: trains a contender for some steps, and saves and loads it on command.

    python -m benchmarks.checkpoints.worker '{"shape": "27m", "folder": "/tmp/x", "contender": {...}}'

Prints facts as a line of JSON, and then does what each line on stdin says: ``save``, ``load`` or ``asynchronous``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.lib.models import SHAPES, Workload, make_workload
from benchmarks.lib.processes import high_water_bytes
from benchmarks.peers.contenders import TrainStep, build
from benchmarks.peers.worker import _NEED_A_GROUP, _forget_resident_peak, join, meet
from zerofx.scheduler.search.problem import BudgetMissedError

BLOCK_BYTES = 16 << 20
BYTES_PER_PARAMETER = (4, 8)  # of a rank's two files: the parameter in fp32, and AdamW's two states
WARM_UP_STEPS, MOST_STEPS = 2, 100


@dataclass(frozen=True)
class Saver:
    """Saves into a folder and loads from it; ``begin``, where there is one, saves asynchronously: it gives what says
    whether all is written, and what waits for it."""

    step: Callable[[], Any]
    save: Callable[[Path], Any]
    load: Callable[[Path], Any]
    begin: Callable[[Path], tuple[Callable[[], bool], Callable[[], Any]]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    # Libraries write to stdout what they like; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    device = join("cpu", alone=request["contender"]["family"] not in _NEED_A_GROUP)
    work = make_workload(SHAPES[request["shape"]], device, torch.float32, int(os.environ["RANK"]))
    saver = saver_of(request["contender"], work)
    for _ in range(WARM_UP_STEPS):
        saver.step()
    answers.write(json.dumps(saver.facts) + "\n")
    place = Path(request["folder"]) / "saved"
    for line in sys.stdin:
        match line.strip():
            case "save":
                answer = timed(lambda: saver.save(place))
            case "load":
                forget_pages(place)
                answer = timed(lambda: saver.load(place))
            case _:
                answer = beside(saver, place.with_name("saved later"))
        answers.write(json.dumps(answer) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def timed(function: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a call that all ranks begin together, and what was resident at the most above what was before."""
    gc.collect()
    os.sync()
    before = resident_bytes()
    assert _forget_resident_peak(), "the kernel forgets the mark of resident memory when it is asked to"
    meet()
    began = time.perf_counter()
    function()
    taken = time.perf_counter() - began
    return {"seconds": taken, "more_bytes": max(0, high_water_bytes() - before)}


def beside(saver: Saver, place: Path) -> dict[str, Any]:
    """The seconds of steps during which a checkpoint is written, and of some before: wall time, and CPU time."""
    assert saver.begin is not None
    os.sync()
    between = [seconds_of(saver.step) for _ in range(4)]
    during: list[tuple[float, float]] = []
    meet()
    starting, starting_cpu = time.perf_counter(), time.thread_time()
    is_done, finish = saver.begin(place)
    starting, starting_cpu = time.perf_counter() - starting, time.thread_time() - starting_cpu
    while len(during) < MOST_STEPS:
        during.append(seconds_of(saver.step))
        if all_ranks(is_done()):
            break
    finish()
    # Until the call returns, no step runs.
    during[0] = (during[0][0] + starting, during[0][1] + starting_cpu)
    return {"between": between, "during": during}


def all_ranks(is_done: bool) -> bool:
    done = torch.tensor(is_done, dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


def seconds_of(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step, and CPU seconds of the thread that runs it."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - began, time.thread_time() - began_cpu


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def forget_pages(folder: Path) -> None:
    """Have the system's page cache let go of all files below ``folder``."""
    meet()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def saver_of(request: dict[str, Any], work: Workload) -> Saver:
    """The contender that ``request`` names, ready to train."""
    if request["family"] == "plain":
        return plain(sum(p.numel() for p in work.model.parameters()))
    if request["family"] == "zerofx":
        return of_zerofx(request, work)
    step = build(request, work, torch.device("cpu"))
    return of_fsdp2(step) if request["family"] == "fsdp2" else of_deepspeed(step)


def plain(num_parameters: int) -> Saver:
    """Two files a rank, of as many bytes as a checkpoint has, from memory and to it."""
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    memory = [memoryview(bytearray(each * num_parameters // num_ranks)) for each in BYTES_PER_PARAMETER]
    for block in memory:
        block[::4096] = bytes(len(block[::4096]))  # its pages are there

    def save(place: Path) -> None:
        place.mkdir(exist_ok=True)
        meet()
        for number, data in enumerate(memory):
            file = os.open(place / f"{number}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for start in range(0, len(data), BLOCK_BYTES):
                os.write(file, data[start : start + BLOCK_BYTES])
            os.fsync(file)
            os.close(file)
        meet()
        if rank == 0:
            folder = os.open(place, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        meet()

    def load(place: Path) -> None:
        for number, data in enumerate(memory):
            file = os.open(place / f"{number}-{rank}", os.O_RDONLY)
            for start in range(0, len(data), BLOCK_BYTES):
                os.readv(file, [data[start : start + BLOCK_BYTES]])
            os.close(file)
        meet()

    return Saver(lambda: None, save, load)


def of_zerofx(request: dict[str, Any], work: Workload) -> Saver:
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True)

    def compiled(budget: int | None) -> zerofx.Step:
        return zerofx.compile(
            work.model, optimizer, request["stage"], backend="eager", example_batch=work.batch, memory_budget=budget,
            offload="auto" if budget is None else "nvme",
        )  # fmt: skip

    if request.get("nvme"):
        try:
            compiled(1)
        except BudgetMissedError as error:
            least = error.least_bytes
        step = compiled(least)
    else:
        step = compiled(None)
    step(**work.batch)
    buckets = step._steps.taken.state.layout.buckets  # type: ignore[union-attr]
    largest = max(bucket.numel * bucket.dtype.itemsize for bucket in buckets)

    def begin(place: Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
        step.save_checkpoint(place, asynchronous=True)
        return lambda: step.is_saving is False, step.finish_saving

    return Saver(
        lambda: step(**work.batch), step.save_checkpoint, step.load_checkpoint, begin,
        {"bucket_bytes": largest, "held": step.tiers()},
    )  # fmt: skip


def of_fsdp2(step: TrainStep) -> Saver:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = step.trained

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def load(place: Path) -> None:
        read = state()
        state_dict_loader.load(read, checkpoint_id=place)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])

    return Saver(step.run, lambda place: state_dict_saver.save(state(), checkpoint_id=place), load)


def of_deepspeed(step: TrainStep) -> Saver:
    engine = step.trained
    return Saver(
        step.run,
        lambda place: engine.save_checkpoint(str(place)),
        lambda place: engine.load_checkpoint(str(place)),
    )


if __name__ == "__main__":
    main()
