"""Contenders as processes, one for each rank, which run steps in turn on command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from zerofx.scheduler.cost.probe import processor_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_TAIL_CHARACTERS = 3000


class ContenderFailedError(Exception):
    """A rank of a contender ended without an answer; the message has the end of what it wrote."""


class Ranks:
    """The processes of one contender.

    Args:
        name: for messages.
        module: what each process runs, with ``request`` as JSON for its argument; answers are lines of JSON.
        num_threads: threads of each process.
        cache: the folder of Inductor's cache, which contenders may share; the user's own if None.
        variables: what else their environment has.
        commands: for each rank the command that starts its process, where that is no process of this host's own.
        ranks_per_node: how many ranks share a node; all of them if None.
    """

    def __init__(
        self,
        name: str,
        module: str,
        request: dict[str, Any],
        num_ranks: int,
        num_threads: int,
        cache: Path | None = None,
        variables: Mapping[str, str] | None = None,
        commands: Sequence[Sequence[str]] = (),
        ranks_per_node: int | None = None,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name)
        self._logs = [store / f"{rank}.log" for rank in range(num_ranks)]
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            # Threads sleep while they wait: what else is in memory must not compute.
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"), *([inherited] if inherited else []))),
            **({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache is not None else {}),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_node or num_ranks),
            "STORE": str(store / "store"),
            # Whatever the name of this machine resolves to.
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            **(variables or {}),
        }
        self._processes = [
            subprocess.Popen(
                [*(commands[rank] if commands else ()), sys.executable, "-m", module, json.dumps(request)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % (ranks_per_node or num_ranks))},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
            )
            for rank, log in enumerate(self._logs)
        ]

    def read(self) -> list[Any]:
        """The next answer of every rank.

        Raises:
            ContenderFailedError: a rank ended, or closed its output.
        """
        lines = []
        for rank, process in enumerate(self._processes):
            line = _stream(process.stdout).readline()
            if not line:
                text = self._logs[rank].read_text(errors="replace")[-_TAIL_CHARACTERS:]
                raise ContenderFailedError(f"{self.name}, rank {rank}, ended early:\n{text}")
            lines.append(json.loads(line))
        return lines

    def send(self, line: str) -> None:
        """Say ``line`` to every rank."""
        for process in self._processes:
            stream = _stream(process.stdin)
            stream.write(f"{line}\n")
            stream.flush()

    def run(self, num_steps: int) -> list[tuple[float, float]]:
        """The seconds of each of ``num_steps`` steps, those of the slowest rank, and the CPU seconds of all ranks."""
        self.send(str(num_steps))
        by_step = zip(*self.read(), strict=True)
        return [(max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)) for ranks in by_step]

    def close(self) -> None:
        """End the processes, and wait for them."""
        for process in self._processes:
            # One that has failed takes the others with it: they may wait for it in a collective.
            process.kill()
        for process in self._processes:
            process.wait()
            _stream(process.stdin).close()
            _stream(process.stdout).close()
        self._folder.cleanup()


def high_water_bytes(process: int | str = "self") -> int:
    """The most of a process of Linux that was ever resident; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def device_name(device_type: str) -> str:
    """What the makers call this machine's GPU, or its processor."""
    return torch.cuda.get_device_name() if device_type == "cuda" else processor_name()


def _stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
