"""What the cases are made for: the device, sizes of models, and what the machine has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import ROOT

_DRIVE_BYTES = 20e9  # the least that is worth offloading to
_SECONDS_FOR_FACTS = 60.0


@dataclass(frozen=True)
class Sizes:
    """Names of ``benchmarks.lib.models.SHAPES``, and counts.

    ``peak_bytes`` and ``deep_peak_bytes`` are predicted of a step of ``shape`` and of ``deep`` with ``deep_layers``
    without a budget: budgets are shares of them, so that no case waits for another. ``caps`` are bytes for states on
    the host with masters in float32: first what all contenders have, then what DeepSpeed's and FSDP2's peaks were.
    ``seconds_share`` is what cases take of their cost at these sizes; ``has_each_kind_once`` is for a trial of the
    code: of cases that run the same lines of it, the first.
    """

    num_steps: int
    num_sequences: int
    shape: str
    deep: str
    deep_layers: int
    other: str
    peak_bytes: float
    deep_peak_bytes: float
    caps: tuple[float, float, float]
    rounds: int
    steps: int
    host_layers: int
    nvme_layers: int
    bucket_millions: int
    stream_bytes: int
    frontier_arguments: tuple[str, ...]
    backend: str = "inductor"
    seconds_share: float = 1.0
    has_each_kind_once: bool = False
    kernel_arguments: tuple[str, ...] = ()
    drive_arguments: tuple[str, ...] = ()


SIZES: Mapping[str, Sizes] = {
    "full": Sizes(
        num_steps=200,
        num_sequences=16,
        shape="llama-1b",
        deep="llama-8b",
        deep_layers=32,  # all of Llama 3 8B
        other="llama-8b-8",
        peak_bytes=18_152_489_540,
        deep_peak_bytes=58_927_948_684,
        caps=(13e9, 6.42e9, 4.35e9),
        rounds=2,
        steps=5,
        host_layers=105,  # 24.0 billion parameters
        nvme_layers=142,
        bucket_millions=44,  # a layer of the 1B
        stream_bytes=2 * 10**9,
        frontier_arguments=(
            "--shape", "1b", "--rounds", "2", "--budgets", "16000", "12000", "8000", "6000", "--peers", "dp:0.5",
        ),
    ),
    "tiny": Sizes(
        num_steps=3,
        num_sequences=1,
        shape="tiny",
        deep="tiny-llama",
        deep_layers=3,
        other="tiny-llama",
        peak_bytes=2_076_692,
        deep_peak_bytes=2_732_248,
        caps=(1e9, 1e8, 1e7),
        rounds=1,
        steps=1,
        host_layers=3,
        nvme_layers=4,
        bucket_millions=1,
        stream_bytes=1 << 22,
        frontier_arguments=(
            "--shape", "tiny", "--rounds", "1", "--budgets", "3", "--peers", "dp:0.5", "--steps", "1",
        ),
        seconds_share=0.2,
        has_each_kind_once=True,
        backend="eager",  # on a CPU each kernel is built by a C++ compiler
        kernel_arguments=("--millions", "1", "--rows", "64", "--dim", "64", "--classes", "512", "--rounds", "2"),
        drive_arguments=("--megabytes", "8", "--rounds", "2"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """``machine`` is what ``benchmarks.gpu.machine`` says; ``drive`` is the folder for what goes to NVMe."""

    device: str
    sizes: Sizes
    machine: Mapping[str, Any]
    drive: Path

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def num_threads(self) -> int:
        """Of a case: all cores next to a GPU; on a CPU cases share them."""
        return int(self.machine["cores"]) if self.device == "cuda" else 1

    @property
    def host_bytes(self) -> int:
        """The host memory that a case may take: the rest is for Python, kernels and the system.

        Sizes are those that are there, not those that are free now: what is tried must not depend on the moment.
        """
        return int(0.75 * self.machine["host_bytes"])

    @property
    def device_bytes(self) -> int:
        """The memory of the device; on a CPU, half of the host's."""
        return int(self.machine["host_bytes"] / 2 if self.device == "cpu" else self.machine["gpus"][0]["num_bytes"])

    @property
    def drive_bytes(self) -> int:
        """What is free on the drive, in steps of 10 GB."""
        return int(shutil.disk_usage(self.drive).free // 10**10 * 10**10)

    @property
    def no_device(self) -> str:
        """Why nothing can run here; empty where something can."""
        if "failed" in self.machine:
            return f"no GPU: {self.machine['failed']}"
        if self.device == "cuda" and not self.machine["gpus"]:
            return f"no GPU: torch {self.machine['torch']} sees none"
        return ""


def machine_facts() -> dict[str, Any]:
    """What ``benchmarks.gpu.machine`` says, or under ``"failed"`` why it says nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS_FOR_FACTS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"expected torch to list the devices within {_SECONDS_FOR_FACTS:.0f} s, found it did not"}
    if answer.returncode:
        return {"failed": (answer.stderr.strip().splitlines() or ["ended without a word"])[-1]}
    facts: dict[str, Any] = json.loads(answer.stdout)
    return facts


def lacking(needs: tuple[str, ...], setup: Setup) -> str:
    """What the machine lacks of what a case needs, in words; empty for nothing."""
    for need in needs:
        if number := re.match(r"(\d+) GPUs", need):
            if len(setup.machine["gpus"]) < int(number[1]):
                return f"needs {need}, found {len(setup.machine['gpus'])}"
        elif need == "drive":
            if setup.drive_bytes < _DRIVE_BYTES:
                return f"needs {_DRIVE_BYTES / 1e9:.0f} GB of disk, found {setup.drive_bytes / 1e9:.0f} GB"
        elif "/" in need:
            if not (ROOT / need).exists():
                return f"needs {need}, which is not in this checkout"
        elif need not in setup.machine["libraries"]:
            return f"needs {need}, which is not installed"
    return ""
