"""A net over asynchronous saves: a rank is killed at a random moment, next to a full drive or a second run.

Every other rank ends in time with an error of zerofx's that names the rank, the latest checkpoint is whole, a second
run in the folder saves as if it were alone, and the next save removes what was left.
``python -m tests.nets.saves [FIRST LAST]`` runs 300 cases, or those of these numbers.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch.distributed as dist

import zerofx
from tests.lib.distributed import begin, environment_of_ranks, forked
from tests.lib.models import batches
from tests.lib.runs.checkpoints import UNEVEN, Way
from tests.nets.faults import _free_port
from tests.nets.records import Record, sweep
from zerofx.disk.checkpoint import folder as folders
from zerofx.disk.checkpoint.reader import open_checkpoint

NET, NUM_CASES = "saves", 300
PATIENCE_SECONDS = 4
_LIMIT_SECONDS = 90.0  # for a whole case, on a busy machine
_SLACK_SECONDS = 30.0
_MOST_KILL_SECONDS = 1.5  # after the first step; a save takes some 10 ms
_NEXT_TO = ("nothing", "full drive", "removed folder", "second run")


@dataclass(frozen=True)
class Case:
    """Rank ``victim`` of two is killed ``delay`` seconds after its first step, next to ``next_to`` on rank ``odd``."""

    number: int
    victim: int
    delay: float
    next_to: str
    odd: int

    @property
    def record(self) -> tuple[str, str]:
        return f"case {self.number}, rank {self.victim} killed", f"next to {self.next_to}"

    @classmethod
    def of(cls, number: int) -> Case:
        draw = random.Random(number)
        delay = draw.random() ** 2 * _MOST_KILL_SECONDS
        return cls(number, draw.randrange(2), delay, _NEXT_TO[number % len(_NEXT_TO)], draw.randrange(2))


@dataclass
class Seen:
    """A rank's error, the seconds from the kill to it, those that closing took, and the saves that it has done."""

    error: str = ""
    is_ours: bool = False
    failed_after: float = 0.0
    closed_after: float = 0.0
    num_saved: int = 0
    unexpected: str = ""


def _train(case: Case, rank: int, run: Path, seen: Seen) -> None:
    """Save in each step, until a rank is killed."""
    draw = random.Random(case.number)
    step, _ = Way(3).step()
    ((args, _),) = batches(UNEVEN, rank, 1)
    step(*args)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == case.victim:
        threading.Timer(case.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < case.delay + 2 * _SLACK_SECONDS:
            strikes, most_bytes = draw.random() < 0.5, draw.randrange(100, 20_000)
            if strikes and case.next_to == "full drive" and rank == case.odd:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
            try:
                step.save_checkpoint(run, keep=2, asynchronous=True)
                if strikes and case.next_to == "removed folder" and rank == case.odd:
                    for part in run.glob(".step-*.part"):
                        for path in part.glob("*"):
                            path.unlink(missing_ok=True)
                step(*args)
                step.finish_saving()
                seen.num_saved += 1
            except zerofx.CheckpointError as error:
                if case.next_to not in ("full drive", "removed folder"):
                    seen.unexpected = str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    except BaseException as error:  # noqa: BLE001 - what it is, is the outcome
        seen.error, seen.is_ours = f"{type(error).__name__}: {error}", isinstance(error, zerofx.ZeroFXError)
    seen.failed_after = time.monotonic() - began - case.delay
    began = time.monotonic()
    step.close()
    dist.destroy_process_group()
    seen.closed_after = time.monotonic() - began


def _rank_main(case: Case, rank: int, folder: str, environment: dict[str, str]) -> None:
    begin(environment)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{environment['SAVES_PORT']}", rank=rank, world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    seen = Seen()
    _train(case, rank, Path(folder, "run"), seen)
    _leave(seen, Path(folder, f"{rank}.pkl"))


def _second_main(folder: str, environment: dict[str, str]) -> None:
    """Another run in the same folder, until it is told to end."""
    begin(environment)
    warnings.simplefilter("ignore")
    seen = Seen()
    step, _ = Way(3).step()
    ((args, _),) = batches(UNEVEN, 0, 1)
    step(*args)
    try:
        while seen.num_saved == 0 or not Path(folder, "end").exists():
            step.save_checkpoint(Path(folder, "run"), asynchronous=seen.num_saved % 2 == 0)
            step.finish_saving()
            seen.num_saved += 1
    except BaseException as error:  # noqa: BLE001 - what it is, is the outcome
        seen.error = f"{type(error).__name__}: {error}"
    _leave(seen, Path(folder, "second.pkl"))


def _leave(seen: Seen, path: Path) -> None:
    path.with_suffix(".part").write_bytes(pickle.dumps(seen))
    path.with_suffix(".part").rename(path)
    sys.exit(0)


def run(case: Case) -> Record:
    """Run one case, each rank as a process of its own."""
    with tempfile.TemporaryDirectory() as folder, _free_port() as port:
        environment = environment_of_ranks() | {
            "ZEROFX_TIMEOUT": str(PATIENCE_SECONDS), "SAVES_PORT": str(port), "ZEROFX_CACHE_DIR": "0",
        }  # fmt: skip
        ranks = [forked(f"rank {rank}", _rank_main, case, rank, folder, environment) for rank in (0, 1)]
        second = forked("second", _second_main, folder, environment) if case.next_to == "second run" else None
        processes = [*ranks, *([second] if second is not None else [])]
        try:
            for process in processes:
                process.start()
            problems = [_wrong_of_survivor(case, ranks[1 - case.victim], folder)]
            ranks[case.victim].join(_LIMIT_SECONDS)
            Path(folder, "end").touch()
            if second is not None:
                problems.append(_wrong_of_second(second, folder))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        problems.append(_wrong_in_folder(Path(folder, "run")))
    problems = [problem for problem in problems if problem]
    return Record(*case.record, "wrong" if problems else "exact", "; ".join(problems))


def _wrong_of_survivor(case: Case, process: ForkServerProcess, folder: str) -> str:
    rank = 1 - case.victim
    process.join(_LIMIT_SECONDS)
    path = Path(folder, f"{rank}.pkl")
    if not path.exists():
        return f"rank {rank} {'hangs' if process.is_alive() else f'ended with {process.exitcode}'} without an outcome"
    seen: Seen = pickle.loads(path.read_bytes())
    if process.is_alive():
        return f"rank {rank} does not end"
    if seen.unexpected:
        return f"rank {rank} could not save: {seen.unexpected[:300]}"
    if not seen.is_ours or f"rank {case.victim}" not in seen.error:
        return f"rank {rank}: expected an error of zerofx's that names rank {case.victim}, found {seen.error[:300]}"
    if max(seen.failed_after, seen.closed_after) > PATIENCE_SECONDS + _SLACK_SECONDS:
        return f"rank {rank} took {seen.failed_after:.0f} s to fail, {seen.closed_after:.0f} s to close"
    return ""


def _wrong_of_second(process: ForkServerProcess, folder: str) -> str:
    process.join(_LIMIT_SECONDS)
    path = Path(folder, "second.pkl")
    if not path.exists():
        return "the second run ends without an outcome"
    seen: Seen = pickle.loads(path.read_bytes())
    return f"the second run: {seen.error[:300]}" if seen.error else "" if seen.num_saved else "no second run"


def _wrong_in_folder(run: Path) -> str:
    try:
        if (run / "latest").exists():
            reader = open_checkpoint(run)
            reader.verify(0, 1)
            reader.close()
    except zerofx.CheckpointError as error:
        return f"the latest checkpoint: {error}"
    folders.begin(run, 1).abandon()
    left = [path.name for path in run.iterdir() if path.name.startswith(".")]
    return f"left in the folder: {left}" if left else ""


if __name__ == "__main__":
    numbers = range(*map(int, sys.argv[1:3])) if len(sys.argv) > 2 else range(NUM_CASES)
    sweep(NET, [Case.of(number) for number in numbers], run)
