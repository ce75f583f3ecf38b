"""What the cases of all parts are made for: the device, sizes of models, and what the machine has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DRIVE_BYTES = 20e9  # the least that is worth offloading to


@dataclass(frozen=True)
class Sizes:
    """Names of ``benchmarks.lib.models.SHAPES``, and counts; ``deep_layers`` of ``deep`` fit on one GPU."""

    num_steps: int
    num_sequences: int
    shape: str
    deep: str
    deep_layers: int
    speed_shapes: tuple[str, ...]
    cap: str
    rounds: int
    num_trials: int
    most_layers: int
    frontier_arguments: tuple[str, ...]
    backends: tuple[str, ...] = ("eager", "inductor")
    kernel_arguments: tuple[str, ...] = ()
    drive_arguments: tuple[str, ...] = ()


SIZES: Mapping[str, Sizes] = {
    "full": Sizes(
        num_steps=200,
        num_sequences=16,
        shape="llama-1b",
        deep="llama-8b",
        deep_layers=32,  # all of Llama 3 8B: with AdamW, in bfloat16, predicted to take 64 GB
        speed_shapes=("llama-1b", "llama-8b-8"),
        cap="13GB",
        rounds=3,
        frontier_arguments=("--shape", "1b", "--budgets", "12000", "6000", "--peers", "dp:0.5", "dp:0.2"),
        num_trials=12,
        most_layers=1000,
    ),
    "tiny": Sizes(
        num_steps=3,
        num_sequences=1,
        shape="tiny-llama",
        deep="tiny-llama",
        deep_layers=3,
        speed_shapes=("tiny",),
        cap="1GB",
        rounds=1,
        frontier_arguments=("--shape", "tiny", "--budgets", "3", "--peers", "dp:0.5", "--steps", "1"),
        num_trials=1,
        most_layers=3,
        backends=("eager",),  # on a CPU each kernel is built by a C++ compiler
        kernel_arguments=("--millions", "1", "--rows", "64", "--dim", "64", "--classes", "512", "--rounds", "2"),
        drive_arguments=("--megabytes", "8", "--rounds", "2"),
    ),
}


@dataclass(frozen=True)
class Setup:
    """``machine`` is what ``benchmarks.gpu.machine`` says; ``drive`` is the folder for what goes to NVMe; ``tests`` is
    what pytest is given."""

    device: str
    sizes: Sizes
    machine: Mapping[str, Any]
    drive: Path
    tests: tuple[str, ...] = ("-m", "gpu", "tests/gpu")

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def host_bytes(self) -> int:
        """The host memory that a case may take: the rest is for Python, kernels and the system.

        Sizes are those that are there, not those that are free now: what is tried must not depend on the moment, or
        results of a run before would be of other cases.
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


def lacking(needs: tuple[str, ...], setup: Setup) -> str:
    """What the machine lacks of what a case needs, in words; empty for nothing."""
    for need in needs:
        if number := re.match(r"(\d+) GPUs", need):
            if len(setup.machine["gpus"]) < int(number[1]):
                return f"needs {need}, found {len(setup.machine['gpus'])}"
        elif need == "drive":
            if setup.drive_bytes < _DRIVE_BYTES:
                return f"needs {_DRIVE_BYTES / 1e9:.0f} GB of disk, found {setup.drive_bytes / 1e9:.0f} GB"
        elif need not in setup.machine["libraries"]:
            return f"needs {need}, which is not installed"
    return ""
