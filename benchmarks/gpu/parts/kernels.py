"""Part (e): each own kernel next to Inductor's and torch's, a process for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu.case import OUT, Case, Entry
from benchmarks.gpu.setup import Setup
from benchmarks.kernels.names import CUDA


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """``benchmarks.kernels`` for one group at a time; on a CPU, one of those for CPUs stands for all."""
    for name in CUDA if setup.device == "cuda" else ("products",):
        command = ("-m", "benchmarks.kernels", "--device", setup.device, "--groups", name, "--out", OUT)
        yield Case(name, (*command, *setup.sizes.kernel_arguments), needs=("triton",))
