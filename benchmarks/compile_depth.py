"""Time to compile against depth: zerofx's whole step, cold, at several depths.

    python benchmarks/compile_depth.py --depths 6 24 --rounds 1

Each measurement is a process of its own with an empty compiler cache; depths are interleaved. Writes
``benchmarks/results/compile_depth.json`` and a Markdown table beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def measure_here(depth: int, width: int) -> dict[str, float]:
    """Compile one step in this process and return its times and counts."""
    import torch

    import zerofx
    from gpt import GPT

    model = GPT(256, width, depth, 4, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = tuple(torch.randint(0, 256, (2, 128)) for _ in range(2))
    began = time.perf_counter()
    step = zerofx.compile(model, optimizer, stage=3, example_batch=batch)
    return {
        "seconds": time.perf_counter() - began,
        "regions": step.num_regions,
        "distinct_regions": step.num_distinct_regions,
    }


def measure_cold(depth: int, width: int) -> dict[str, float]:
    """The same in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
        command = [sys.executable, __file__, "--here", str(depth), "--width", str(width)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(measure_here(options.here, options.width)))
        return
    found: dict[int, list[dict[str, float]]] = {depth: [] for depth in options.depths}
    for _ in range(options.rounds):
        for depth in options.depths:
            found[depth].append(measure_cold(depth, options.width))
    medians = {depth: statistics.median(run["seconds"] for run in runs) for depth, runs in found.items()}
    base = medians[options.depths[0]]
    table = tabulate(
        [
            [depth, runs[0]["regions"], runs[0]["distinct_regions"], medians[depth], medians[depth] / base]
            for depth, runs in found.items()
        ],
        headers=["layers", "regions", "distinct", "seconds, cold", f"ratio to {options.depths[0]} layers"],
        floatfmt=".2f",
        tablefmt="github",
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "compile_depth.json").write_text(json.dumps(found, indent=1))
    (RESULTS / "compile_depth.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
