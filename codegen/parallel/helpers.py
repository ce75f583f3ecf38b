"""Compile regions in processes beside this one, which leave them in Inductor's cache on disk.

A helper is given the emitted file, one function's name and what its inputs look like, and compiles it as this process
would (``codegen/parallel/helper.py`` is its program). Nothing comes back but that it is done: this process then
compiles the region too, and finds it in the cache. So a helper that dies, or sees another cache, costs time and nothing
else.

Threads would not do: tracing and lowering change state that torch has once in a process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

MODULE = "zerofx.codegen.parallel.helper"
_MOST_HELPERS = 4  # each holds some 500 MB while it compiles


@dataclass(frozen=True)
class TensorLike:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Task:
    """A region to compile: the emitted file, and in it the function ``name``; ``inputs`` are ``TensorLike`` or scalars.

    ``num_threads``: how many threads the code is generated for. ``kernels``: those of zerofx's own that it uses.
    """

    source: str
    filename: str
    name: str
    inputs: tuple[Any, ...]
    num_threads: int
    kernels: frozenset[str]

    @staticmethod
    def of(source: str, filename: str, name: str, inputs: Sequence[Any], kernels: frozenset[str]) -> Task:
        """The task for ``inputs`` that are fake tensors or scalars, and for as many threads as this process has."""
        looks = tuple(
            TensorLike(tuple(one.shape), tuple(one.stride()), one.dtype, str(one.device))
            if isinstance(one, torch.Tensor)
            else one
            for one in inputs
        )
        return Task(source, filename, name, looks, torch.get_num_threads(), kernels)


def num_helpers(inputs: Iterable[Sequence[Any]]) -> int:
    """How many processes may help with regions of these inputs: one for each further core, and none where a region is
    for a GPU, on which every one of them would take memory."""
    regions = list(inputs)
    types = {one.device.type for values in regions for one in values if isinstance(one, torch.Tensor)}
    if types != {"cpu"} or not hasattr(os, "sched_getaffinity"):
        return 0
    return min(len(os.sched_getaffinity(0)) - 1, len(regions) - 1, _MOST_HELPERS)


class Helpers:
    """Tasks that this process and its helpers share; leave the block to wait for what helpers have begun.

    Args:
        tasks: the first are begun first: put what takes longest in front.
        num_helpers: how many processes, at most.
        command: what each runs; the default is this Python and its module path.
        patience_seconds: helpers are started where the tasks take longer than this, as they do unless all are cached.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        num_helpers: int,
        command: Sequence[str] = (sys.executable, "-m", MODULE),
        patience_seconds: float = 2.0,
    ) -> None:
        self._tasks = deque(tasks.items())
        self._command = list(command)
        self._patience_seconds = patience_seconds
        self._over = threading.Event()
        self._taking = threading.Lock()  # a helper is busy from the moment at which a task is no longer there
        self._idle: set[subprocess.Popen[bytes]] = set()
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_helpers)]

    def __enter__(self) -> Helpers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._taking:
            self._tasks.clear()
            self._over.set()
            for process in [*self._idle, *(self._busy if kind is not None else ())]:
                process.kill()
        for thread in self._threads:
            thread.join()

    def keys(self) -> Iterator[str]:
        """The tasks that no helper has begun, each for this process to do before it asks for the next."""
        while (found := self._next()) is not None:
            yield found[0]

    def _next(self, process: subprocess.Popen[bytes] | None = None) -> tuple[str, Task] | None:
        """A task, for a helper's process or for this one."""
        with self._taking:
            if not self._tasks:
                return None
            if process is not None:
                self._busy.add(process)
                self._idle.discard(process)
            return self._tasks.popleft()

    def _serve(self) -> None:
        """Start a helper, and give it tasks for as long as there are any."""
        if self._over.wait(self._patience_seconds):
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        # A pipe to a process that has died breaks where it is written to, and once more where it is closed.
        with (
            suppress(BrokenPipeError),
            subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what fails there fails here again, and is reported
            ) as process,
        ):
            with self._taking:
                self._idle.add(process)
                is_over = self._over.is_set()  # then nobody looks for idle processes any more
            try:
                if not is_over:
                    self._feed(process)
            finally:
                process.kill()

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        # A helper says that it is ready, and then that each task is done. One that has died says nothing.
        while process.stdout.readline() and (found := self._next(process)) is not None:
            process.stdin.write(pickle.dumps(found[1]))
            process.stdin.flush()
