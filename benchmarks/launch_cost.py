"""The cost of launches: the part of a step in which neither a region computes nor computation waits.

    python -m benchmarks.launch_cost                                        # a GPT of 27M on the CPU
    python -m benchmarks.launch_cost --device cuda --shape llama-1b --dtype bfloat16

On a CPU that is the time of Python between regions, from the call of the step to its return; the stopwatches around
regions are in it. On CUDA it is the time in which the device has nothing to do, and steps are timed with their kernels
launched one by one and as CUDA graphs, in turn (A B A B).

Writes ``benchmarks/results/launch_cost_<device>.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zerofx
from benchmarks.lib.models import SHAPES, Workload, make_workload
from benchmarks.lib.processes import RESULTS, ROOT
from benchmarks.lib.turn import turn

AT_MOST = 0.02  # of a step on a CPU


def build(options: argparse.Namespace, *, graphs: bool) -> tuple[zerofx.Step, Workload]:
    device = torch.device(options.device)
    work = make_workload(SHAPES[options.shape], device, getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True)
    step = zerofx.compile(
        work.model, optimizer, 0, example_batch=work.batch, backend=options.backend, cuda_graphs=graphs
    )
    return step, work


def measure_between(step: zerofx.Step, work: Workload, num_steps: int) -> dict[str, Any]:
    """Median seconds of a step, and of what is between its regions."""
    step(**work.batch)
    with turn():
        measured = step.measure(num_steps=num_steps + 1, **work.batch)
    whole = measured.step_seconds
    return {
        "step_seconds": whole,
        "between_seconds": measured.between_seconds,
        "share": measured.between_seconds / whole,
        "num_regions": step.num_regions,
    }


def time_in_turn(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of steps whose kernels are launched one by one, and as graphs, in turn."""
    steps = {"one by one": build(options, graphs=False), "CUDA graphs": build(options, graphs=True)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with turn():
        for number in range(options.rounds + 1):
            for name, (step, work) in steps.items():
                for _ in range(options.steps):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    step(**work.batch)
                    torch.cuda.synchronize()
                    if number:  # the first round warms up, and records
                        seconds[name].append(time.perf_counter() - began)
    return seconds


def table(row: dict[str, Any]) -> str:
    """Each way to launch a step, with its median seconds; where regions were timed, with the time between them."""
    between, launched = row["between"], row["launched"]
    shown = [
        [
            f"{row['shape']}, {row['dtype']}, {row['backend']}, on {row['device']}",
            str(between["num_regions"]),
            f"{1e3 * between['step_seconds']:.2f}",
            f"{1e3 * between['between_seconds']:.2f}",
            f"{100 * between['share']:.2f} %",
        ]
    ]
    text = tabulate(
        shown,
        ["", "regions", "step ms", "between regions ms", "share"],
        tablefmt="github",
        disable_numparse=True,
    )
    if not launched:
        return text
    medians = {name: statistics.median(seconds) for name, seconds in launched.items()}
    first = next(iter(medians.values()))
    lines = [[name, f"{1e3 * seconds:.2f}", f"{seconds / first:.3f}"] for name, seconds in medians.items()]
    return text + "\n\n" + tabulate(lines, ["kernels launched", "step ms", "ratio"], tablefmt="github")


def main() -> None:
    sys.path.append(str(ROOT / "examples"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of steps launched in turn, on CUDA")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    step, work = build(options, graphs=False)
    row: dict[str, Any] = {name: getattr(options, name) for name in ("shape", "dtype", "device", "backend")}
    row["between"] = measure_between(step, work, options.steps)
    step.close()
    row["launched"] = time_in_turn(options) if options.device == "cuda" else {}
    text = table(row)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"launch_cost_{options.device}.json"
    path.write_text(json.dumps(row, indent=1))
    path.with_suffix(".md").write_text(text + "\n")
    print(text)
    share = row["between"]["share"]
    print(f"between regions: {100 * share:.2f} % of a step (on a CPU at most {100 * AT_MOST:.0f} %)")


if __name__ == "__main__":
    main()
