"""Run a function on several ranks, each a process of its own, joined by gloo."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.lib.captures import shared_captures

T = TypeVar("T")

# How long a test waits for other processes: what is too long for the busiest machine is a hang.
PATIENCE_SECONDS = 600.0

# What most ranks import: read once, by the process that all of them are forked from.
_PRELOADED = ["zerofx.api", "zerofx.tuning.tuner", "torch._inductor.compile_fx", "torch.distributed.fsdp"]
_PRELOADED += ["pytest", "transformers", "tests.lib.runs.training"]
_PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "mixtral")]

# How long the other ranks get to end by themselves, with their own traceback, once one has failed.
_GRACE_SECONDS = 2.0


class RankError(Exception):
    """A rank ended without a result: it raised what cannot be pickled, crashed, or ran out of time."""


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = PATIENCE_SECONDS) -> list[T]:
    """Call `fn(*args)` on `world_size` ranks, and give their results in the order of the ranks.

    Each rank is a process of one thread with a gloo default group, forked from one that has only imported modules;
    `fn` learns who it is from `torch.distributed`. The environment and what becomes of warnings are those of the test
    that calls. No rank outlives the call.

    Args:
        fn: a function at the top level of a module, as it travels by name; its arguments and result are pickled.
        timeout: seconds for the whole, many times what a busy machine takes; a collective that waits half as long for
            another rank fails.

    Raises:
        Exception: what the first rank to fail raised, with the traceback of every rank that failed as a note.
        RankError: a rank crashed, raised what cannot be pickled, or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = _ranks(fn, world_size, folder, timeout, args)
        in_time = run_to_their_end(ranks, timeout)
        return _collect([Path(folder, f"{rank}.pkl") for rank in range(world_size)], ranks, in_time, timeout)


def start_ranks(fn: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[ForkServerProcess]:
    """Start `fn(*args)` on several ranks as `run_ranks` does, and leave it to the caller to wait for them or kill them.

    They meet in `folder`, which is empty.
    """
    ranks = _ranks(fn, world_size, str(folder), PATIENCE_SECONDS, args)
    for process in ranks:
        process.start()
    return ranks


def _ranks(
    fn: Callable[..., Any], world_size: int, folder: str, timeout: float, args: tuple[Any, ...]
) -> list[ForkServerProcess]:
    # Processes pickle through multiprocessing, whose reductions for tensors share memory: send plain bytes.
    call = pickle.dumps((fn, args))
    environment, filters = environment_of_ranks(), warnings.filters[:]
    return [
        forked(f"rank {rank}", _rank_main, call, rank, world_size, folder, timeout, environment, filters)
        for rank in range(world_size)
    ]


def forked(name: str, main: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process to start that calls `main(*args)`, forked from one that has only imported modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context.Process(target=main, args=args, name=name)


def run_to_their_end(ranks: list[ForkServerProcess], timeout: float) -> bool:
    """Start all ranks and wait for them, as `wait_for` does; none outlives the call."""
    try:
        for process in ranks:
            process.start()
        return wait_for(ranks, timeout)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def wait_for(ranks: list[ForkServerProcess], timeout: float) -> bool:
    """Wait for all ranks to end, a short while only after one has failed; whether they made it in `timeout` seconds."""
    deadline = time.monotonic() + timeout
    failed = False
    running = list(ranks)
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            return failed
        multiprocessing.connection.wait([process.sentinel for process in running], left)
        running = [process for process in running if process.is_alive()]
        if not failed and any(process.exitcode for process in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return True


def _collect(paths: list[Path], ranks: list[ForkServerProcess], in_time: bool, timeout: float) -> list[Any]:
    outcomes = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    failures = sorted((failure for failure in outcomes if failure and failure[0] == "error"), key=lambda one: one[1])
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if failures:
        error = pickle.loads(failures[0][2])
        for _, _, _, text in failures:
            error.add_note(text)
        for rank in silent:
            error.add_note(f"rank {rank}: no result, exit code {ranks[rank].exitcode} (-9 may be our own doing)")
        raise error
    if not in_time:
        raise RankError(f"ranks {silent} of {len(ranks)} did not end within {timeout:g} s")
    if silent:
        codes = {rank: ranks[rank].exitcode for rank in silent}
        raise RankError(f"ranks ended without a result; exit codes by rank, where -9 may be our own doing: {codes}")
    return [pickle.loads(outcome[1]) for outcome in outcomes if outcome is not None]


def _rank_main(
    call: bytes,
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    environment: dict[str, str],
    filters: list[Any],
) -> None:
    begin(environment)
    # Objects of each rank lie elsewhere, as on ranks that are not forked: an order that comes of addresses shows.
    shifts = [bytearray(size) for size in range(16, 512, 16) for _ in range(3 * rank)]
    torch.manual_seed(0)
    outcome: tuple[Any, ...]
    try:
        fn, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "store").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout / 2),
        )
        warnings.filters[:] = filters  # type: ignore[index]  # a list, which typeshed does not say
        with shared_captures():
            outcome = ("result", pickle.dumps(fn(*args)))
        del shifts
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # a process that was forked off ends without
    except BaseException as error:  # noqa: BLE001 - the caller's process raises it again
        text = f"rank {rank}:\n{traceback.format_exc()}"
        outcome = ("error", time.monotonic(), _pickled(error, rank), text)
    # Written aside and renamed, so that a rank killed in the act leaves no half of a result.
    path = Path(folder, f"{rank}.pkl")
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    if outcome[0] == "error":
        # No clean-up: destroying a group whose other ranks still wait in a collective may wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _pickled(error: BaseException, rank: int) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception as reason:  # noqa: BLE001 - pickling runs the exception's own code
        return pickle.dumps(RankError(f"rank {rank} raised {type(error).__name__}: {error} (not pickled: {reason})"))
    return data


def begin(environment: dict[str, str]) -> None:
    """Make this process, which was forked, one with that environment and one thread, which ends with its parent."""
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def environment_of_ranks() -> dict[str, str]:
    """What ranks find in `os.environ`."""
    wanted = {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the name of this machine resolves to
    return {**os.environ, **wanted}
