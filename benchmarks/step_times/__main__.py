"""Predicted and measured seconds of a step on this machine's CPU, plan by plan, after ``Machine.measure()``.

    python -m benchmarks.step_times
    python -m benchmarks.step_times --models cnn --keep-memory    # without the page faults of memory that is freed
    python -m benchmarks.step_times --models gpt --ranks 1 --shares 1 0 --rounds 2 --regions     # short, in detail

Models are the GPT and the unmodified HF Llama of 27M and the convolutional network of the examples; plans are those of
each stage without a budget (share 1), within a budget (0.6 of what the first takes above what lives throughout the
step) and within the least that can be met (0). All plans of a model are built in the same processes, from the machine
as these have measured it, and run in turn; measured is the median over the rounds of the slowest rank.

The order of two plans of a model on as many ranks counts where they differ by more than 5 % as measured.

Writes ``benchmarks/results/step_times.json`` and a Markdown table; what was found of other models and ranks stays.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.lib.json_file import write_json
from benchmarks.lib.processes import RESULTS, device_name
from benchmarks.step_times.measure import conclusion, measure, region_tables, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("gpt", "llama", "cnn"), default=["gpt", "llama", "cnn"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 3])
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[1.0, 0.6, 0.0], help="of the memory; the first is 1"
    )
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each plan in a round")
    parser.add_argument("--keep-memory", action="store_true", help="have the C library keep what steps free")
    parser.add_argument("--regions", action="store_true", help="show where the time goes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    name = "step_times" if options.backend == "inductor" else f"step_times_{options.backend}"
    results = options.out / f"{name}.json"
    by_name = {g["name"]: g for g in json.loads(results.read_text())["groups"]} if results.exists() else {}
    for model in options.models:
        for num_ranks in options.ranks:
            group = measure(model, num_ranks, options)
            by_name[group["name"]] = group
            print(table([group]), flush=True)
    groups = [by_name[group_name] for group_name in sorted(by_name)]
    text = f"{device_name('cpu')}, torch {torch.__version__}, {options.backend}, {options.threads} thread(s) a rank\n\n"
    text += f"{table(groups)}\n\n{conclusion(groups)}\n"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(results, {"backend": options.backend, "groups": groups})
    (options.out / f"{name}.md").write_text(text)
    print(region_tables(groups) if options.regions else "", text, sep="\n")


if __name__ == "__main__":
    main()
