"""Start-up times: imports of zerofx and commands that need no device, compared with the import of torch.

    python -m benchmarks.startup            # a minute on an idle machine
    python -m benchmarks.startup --rounds 9

Each measurement is a fresh process, from its start to its end; rounds are interleaved, and what is printed are medians
and their ratios to an empty Python and to ``import torch`` in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from tabulate import tabulate
from tqdm import tqdm

NOTHING, TORCH = "python -c pass", "import torch"
PROGRAMS = {
    NOTHING: ["-c", "pass"],
    TORCH: ["-c", "import torch"],
    "import torch, zerofx": ["-c", "import torch, zerofx"],
    "import zerofx; zerofx.compile": ["-c", "import zerofx; zerofx.compile"],
    "zerofx --help": ["-m", "zerofx", "--help"],
    "zerofx machines": ["-m", "zerofx", "machines"],
    "zerofx --version": ["-m", "zerofx", "--version"],
}


def seconds(arguments: list[str]) -> float:
    """Wall-clock seconds of one run of Python."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def table(seconds_of: dict[str, list[float]]) -> str:
    """Medians, what they are more than an empty Python, and their ratios to ``import torch``."""
    medians = {name: statistics.median(runs) for name, runs in seconds_of.items()}
    rows = [
        [name, f"{median:.2f}", f"{median - medians[NOTHING]:.2f}", f"{median / medians[TORCH]:.2f}"]
        for name, median in medians.items()
    ]
    headers = ["program", "s", "more than Python alone, s", "/ import torch"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long zerofx takes to be there.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seconds_of: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for arguments in PROGRAMS.values():
        seconds(arguments)  # files are read from the drive once
    for name in tqdm([name for _ in range(options.rounds) for name in PROGRAMS], unit="run"):
        seconds_of[name].append(seconds(PROGRAMS[name]))
    print(table(seconds_of))


if __name__ == "__main__":
    main()
