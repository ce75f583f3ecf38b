"""Run cases in worker processes, so that a crash or a hang is the outcome of one case and ends no sweep."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

C = TypeVar("C")
R = TypeVar("R")


class WorkerError(Exception):
    """A case ended its worker, or took longer than it may."""


def run_in_workers(
    function: Callable[[C], R], cases: Sequence[C], num_workers: int = 1, timeout: float = 120.0
) -> Iterator[tuple[C, R | WorkerError]]:
    """``(case, function(case))`` in the order in which cases end.

    Args:
        function: at the top level of a module, as it travels by name; cases and results are pickled.
        cases: what to call it with.
        num_workers: processes that live as long as the sweep, of one thread each.
        timeout: seconds that a case may take.

    An exception that ``function`` raises is a ``WorkerError`` with its text, as a crash and a hang are.
    """
    idle: SimpleQueue[_Worker[C, R]] = SimpleQueue()
    workers: list[_Worker[C, R]] = [_Worker(function, timeout) for _ in range(num_workers)]
    for worker in workers:
        idle.put(worker)

    def run(case: C) -> tuple[C, R | WorkerError]:
        worker = idle.get()
        try:
            return case, worker.run(case)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(num_workers)
    try:
        for future in as_completed([pool.submit(run, case) for case in cases]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()


class _Worker(Generic[C, R]):
    """A process that runs one case after the other, and is replaced by a fresh one where it dies."""

    def __init__(self, function: Callable[[C], R], timeout: float) -> None:
        self._function = function
        self._timeout = timeout
        self._process: SpawnProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_ready = False

    def run(self, case: C) -> R | WorkerError:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._function), daemon=True)
            self._process.start()
            theirs.close()
        assert self._process is not None
        try:
            if not self._is_ready:
                self._connection.recv()
                self._is_ready = True
            self._connection.send(case)
            if not self._connection.poll(self._timeout):
                self.stop()
                return WorkerError(f"took longer than {self._timeout:g} s")
            ended, result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self.stop()
            return WorkerError(f"ended its process with exit code {code}")
        return result if ended else WorkerError(result)

    def stop(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._is_ready = False
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.join()


def _serve(connection: Connection[Any, Any], function: Callable[[Any], Any]) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    connection.send("ready")
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(case)
        except Exception as error:  # noqa: BLE001  # whatever a case raises is its outcome
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)
