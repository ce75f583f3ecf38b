"""Bytes per second of an update on the host, compared with a copy of memory as in STREAM, in one run.

    python -m benchmarks.host_update

AdamW's fused kernel on flat fp32 shards, called as a step calls it (``Runtime.host``: a thread of its own, tensors that
lie in blocks of the host's pool), reads gradient, parameters and both moments, and writes the last three: 28 bytes for
each parameter. The copy (McCalpin's STREAM) reads one array and writes another, each longer than the caches: 16 bytes
for each pair of doubles. Both run on as many threads. Rounds alternate between the two, and the ratio is of their
medians: what writing costs beyond its own bytes (a line is read before it is written) counts for neither.

Writes ``benchmarks/results/host_update.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.lib.processes import RESULTS
from benchmarks.lib.turn import turn
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers

BYTES_PER_PARAMETER = 4 * 4 + 3 * 4  # gradient, parameter, moments read; parameter, moments written


def make_copy(num_bytes: int) -> Callable[[], None]:
    """STREAM's copy between two arrays that together have ``num_bytes``."""
    source = torch.ones(num_bytes // 16, dtype=torch.float64)
    destination = torch.zeros_like(source)

    def copy() -> None:
        destination.copy_(source)

    return copy


def make_update(tiers: Tiers, num_bytes: int) -> Callable[[], None]:
    """The update of one bucket whose gradient, parameters and moments together have ``num_bytes``."""
    numel = num_bytes // 16
    step = torch.tensor(10.0)
    held = [tiers.hold(torch.rand(numel), "host") for _ in range(4)]

    def update(inputs: list[Any]) -> None:
        parameter, gradient, first, second = inputs
        torch.ops.aten._fused_adamw_.default(
            [parameter], [gradient], [first], [second], [], [step], amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8,
            lr=1e-3, maximize=False, weight_decay=0.01,
        )  # fmt: skip

    def run() -> None:
        states: list[Stored] = list(held)
        tiers.on_host(update, states)

    return run


def measure(num_bytes: int, num_rounds: int) -> dict[str, list[float]]:
    """Bytes per second of both, round by round."""
    tiers = Tiers(torch.device("cpu"), [])
    copy, update = make_copy(num_bytes), make_update(tiers, num_bytes)
    touched = {"copy": num_bytes // 16 * 16, "update": num_bytes // 16 * BYTES_PER_PARAMETER}
    rounds: dict[str, list[float]] = {name: [] for name in touched}
    copy(), update()  # the first touch of a page makes it
    for _ in range(num_rounds):
        for name, function in (("copy", copy), ("update", update)):
            began = time.perf_counter()
            function()
            rounds[name].append(touched[name] / (time.perf_counter() - began))
    tiers.close()
    return rounds


def row(rounds: dict[str, list[float]]) -> dict[str, float]:
    """Medians and best in bytes per second, and the ratios of the update's to the copy's."""
    median = {name: statistics.median(rates) for name, rates in rounds.items()}
    best = {name: max(rates) for name, rates in rounds.items()}
    return {
        "copy": median["copy"],
        "update": median["update"],
        "ratio": median["update"] / median["copy"],
        "best_ratio": best["update"] / best["copy"],
    }


def table(medians: dict[str, float]) -> str:
    """The row as Markdown."""
    headers = ["copy, GB/s", "update, GB/s", "ratio of medians", "ratio of the best"]
    cells = [f"{medians['copy'] / 1e9:.2f}", f"{medians['update'] / 1e9:.2f}"]
    cells += [f"{medians['ratio']:.2f}", f"{medians['best_ratio']:.2f}"]
    return tabulate([cells], headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512, help="of all arrays of the update, and of the copy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with turn(whole_machine=True):
        rounds = measure(options.megabytes << 20, options.rounds)
    medians = row(rounds)
    shown = table(medians)
    print(shown)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"threads": options.threads, "num_bytes": options.megabytes << 20, "row": medians, "rounds": rounds}
    (options.out / "host_update.json").write_text(json.dumps(data, indent=1))
    (options.out / "host_update.md").write_text(shown + "\n")


if __name__ == "__main__":
    main()
