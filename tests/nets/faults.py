"""A net over faults: a rank that freezes, is killed or interrupted at every kind of wait of the others.

What is promised: every other rank ends within its patience with an error of zerofx's that names the rank, or says what
became of it; ``close()``, ``destroy_process_group()`` and the end of the process then take no more than a moment.
``python -m tests.nets.faults`` runs all cases and writes ``benchmarks/results/coverage_faults.json``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import begin, environment_of_ranks, forked
from tests.nets.records import Record, sweep
from zerofx.runtime.comm.same_host import channels

PATIENCE_SECONDS = 4
_SLACK_SECONDS = 40.0  # for a busy machine, and much less than any timeout of torch's own
_LIMIT_SECONDS = 150.0  # for a whole case, its start included
_SIGNALS = {"frozen": signal.SIGSTOP, "killed": signal.SIGKILL, "interrupted": signal.SIGINT}


class Model(nn.Module):
    """Two equal layers, a head, and a buffer that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)])
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 8)
        self.forwarded: Callable[[], None] = _nothing

    def forward(self, x: Tensor) -> Tensor:
        self.forwarded()
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x)).square().mean()
        return out


@dataclass(frozen=True)
class Fault:
    """Rank ``victim`` gets ``what`` in the place ``where``, of ``num_ranks`` that are joined by ``channel``."""

    what: str
    where: str
    channel: str = "memory"
    victim: int = 1
    num_ranks: int = 2

    @property
    def record(self) -> tuple[str, str]:
        return f"{self.what} rank", f"{self.where}, {self.channel}, rank {self.victim} of {self.num_ranks}"


def _nothing() -> None:
    pass


# Where the fault comes: what of the step it is in, and at which stage. ``wrapped`` names a method of the runtime.
_STAGES = {
    "compile": 3, "capture": 3, "plan": 3, "first step": 3, "next step": 3, "gather": 3, "reduce-scatter": 2,
    "all-reduce": 0, "broadcast": 2, "full parameters": 3, "state dict": 2, "close": 3,
}  # fmt: skip
_WRAPPED = {"gather": "all_gather", "reduce-scatter": "reduce_scatter", "broadcast": "broadcast"}


def cases() -> list[Fault]:
    """Every place, fault and channel; where it tells, also with three ranks and with rank 0 as the victim."""
    found = [Fault(what, where) for where in _STAGES for what in _SIGNALS]
    found += [Fault(what, where, "gloo") for where in (*_WRAPPED, "all-reduce", "close") for what in _SIGNALS]
    found += [
        Fault(what, where, victim=0)
        for where in ("capture", "plan", "next step", "reduce-scatter")
        for what in _SIGNALS
    ]
    found += [
        Fault(what, where, num_ranks=3, victim=2) for where in ("next step", "reduce-scatter") for what in _SIGNALS
    ]
    return found


def _run_rank(fault: Fault, rank: int) -> None:
    """Train, with the fault in its place on the victim."""
    model = Model()
    done = [False]

    def strike() -> None:
        if rank == fault.victim and not done[0]:
            done[0] = True
            os.kill(os.getpid(), _SIGNALS[fault.what])

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any, **kwargs: Any) -> Any:
            strike()
            return function(*args, **kwargs)

        return struck

    where = fault.where
    if where == "capture":
        model.forwarded = strike
    if where == "compile":
        strike()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = zerofx.compile(model, optimizer, _STAGES[where], backend="eager")
    _CLOSING.append(step)
    x = torch.ones(4, 64)
    if where == "plan":
        control: Any = step._control
        control.share = before(control.share)
    if where == "first step":
        strike()
    step(x)
    if where == "next step":
        strike()
    runtime: Any = step._steps.taken.runtime  # type: ignore[union-attr]  # trained
    if where in _WRAPPED:
        for name in (_WRAPPED[where], f"{_WRAPPED[where]}_into"):
            if hasattr(runtime, name):
                setattr(runtime, name, before(getattr(runtime, name)))
    if where == "all-reduce":
        runtime.wait = before(runtime.wait)
    for _ in range(2):
        step(x)
    state: Any = step._steps.taken.state  # type: ignore[union-attr]  # trained
    if where == "full parameters":
        state.show_parameters = before(state.show_parameters)
        step.full_state_dict()
    if where == "state dict":
        state.gather = before(state.gather)
        step.optimizer.state_dict()
    if where == "close":
        state.show_parameters = before(state.show_parameters)
    step.close()


_CLOSING: list[zerofx.Step] = []


@dataclass
class _Seen:
    """What a rank saw: its error, and the seconds until the error, the end of ``close``, and that of the group."""

    error: str = ""
    is_ours: bool = False
    failed_after: float = 0.0
    closed_after: float = 0.0
    close_error: str = ""


def _rank_main(fault: Fault, rank: int, folder: str, environment: dict[str, str]) -> None:
    begin(environment)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fault.channel == "gloo":
        channels._machine = lambda: 0  # as between hosts: nobody can read another's memory
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{environment['FAULTS_PORT']}", rank=rank, world_size=fault.num_ranks,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    seen = _Seen()
    began = time.monotonic()
    try:
        _run_rank(fault, rank)
    except BaseException as error:  # noqa: BLE001 - what it is, is the outcome
        seen.error = f"{type(error).__name__}: {error}"
        seen.is_ours = isinstance(error, zerofx.ZeroFXError)
    seen.failed_after = time.monotonic() - began
    began = time.monotonic()
    try:
        for step in _CLOSING:
            with contextlib.suppress(zerofx.RankMismatchError):  # of a rank that is found out here to be gone
                step.close()
            step.close()
        _CLOSING.clear()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - likewise
        seen.close_error = f"{type(error).__name__}: {error}"
    seen.closed_after = time.monotonic() - began
    path = Path(folder, f"{rank}.pkl")
    path.with_suffix(".part").write_bytes(pickle.dumps(seen))
    path.with_suffix(".part").rename(path)
    sys.exit(0)


def run(fault: Fault) -> Record:
    """Run one case, all of its ranks as processes of their own."""
    with tempfile.TemporaryDirectory() as folder, _free_port() as port:
        environment = environment_of_ranks() | {
            "ZEROFX_TIMEOUT": str(PATIENCE_SECONDS), "FAULTS_PORT": str(port), "ZEROFX_CACHE_DIR": "0",
        }  # fmt: skip
        ranks = [
            forked(f"rank {rank}", _rank_main, fault, rank, folder, environment) for rank in range(fault.num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            survivors = [rank for rank in range(fault.num_ranks) if rank != fault.victim]
            problems = [problem for rank in survivors if (problem := _wrong(fault, rank, ranks[rank], folder))]
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
    return Record(*fault.record, "wrong" if problems else "exact", "; ".join(problems))


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that the ranks' store may take."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    yield port


def _wrong(fault: Fault, rank: int, process: ForkServerProcess, folder: str) -> str:
    """What a survivor did that it should not have; empty where it did all as promised."""
    process.join(_LIMIT_SECONDS)
    path = Path(folder, f"{rank}.pkl")
    if not path.exists():
        return f"rank {rank} {'hangs' if process.is_alive() else f'ended with {process.exitcode}'} without an outcome"
    if process.is_alive():
        return f"rank {rank} does not end"
    seen: _Seen = pickle.loads(path.read_bytes())
    if not seen.is_ours:
        return f"rank {rank}: expected an error of zerofx's, found {seen.error or 'none'}"
    if f"rank {fault.victim}" not in seen.error:
        return f"rank {rank}: expected rank {fault.victim} to be named, found {seen.error}"
    if seen.failed_after > PATIENCE_SECONDS + _SLACK_SECONDS:
        return f"rank {rank} took {seen.failed_after:.0f} s to fail"
    if seen.close_error:
        return f"rank {rank}: close() raised {seen.close_error}"
    if seen.closed_after > _SLACK_SECONDS:
        return f"rank {rank} took {seen.closed_after:.0f} s to close"
    return ""


def sample(number: int, seed: int) -> Sequence[Fault]:
    """As many cases as ``seed`` picks."""
    return random.Random(seed).sample(cases(), number)


if __name__ == "__main__":
    sweep("faults", cases(), run)
