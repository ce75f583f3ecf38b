"""An update on the host by blocks, compared with the same operators on whole tensors and with STREAM's copy.

    python -m benchmarks.host_update --threads 2

AdamW's fused kernel on a bucket in bfloat16 with float32 masters, called as a step calls it (``Runtime.host``: a thread
of its own, tensors that lie in blocks of the host's pool): the gradient is cast, master and moments are updated, and
parameters are cast. Whole tensors move 40 bytes for each parameter, a pass by blocks 28, which both are rated by. The
copy (McCalpin's STREAM) reads an array and writes another, each longer than the caches. Rounds alternate between the
three; what writing costs beyond its own bytes (a line is read before it is written) counts for none. Seconds of
computation are next to those of the clock: on cores that other programs share only the former compare.

Writes ``benchmarks/results/host_update.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.lib.processes import RESULTS
from benchmarks.lib.turn import turn
from zerofx.codegen.cpu.update_blocks import make_block_update
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers

# Gradient, master, moments read; master, moments, parameter written.
BYTES_PER_PARAMETER = 2 + 3 * 4 + 3 * 4 + 2
ARRAY_BYTES = 2 + 3 * 4 + 2
WAYS = ("copy", "whole", "blocks")


def make_copy(num_bytes: int) -> Callable[[], None]:
    """STREAM's copy between two arrays that together have ``num_bytes``."""
    source = torch.ones(num_bytes // 16, dtype=torch.float64)
    destination = torch.zeros_like(source)

    def copy() -> None:
        destination.copy_(source)

    return copy


def make_update(tiers: Tiers, numel: int) -> dict[str, Callable[[], None]]:
    """The update of a bucket of ``numel`` parameters, on whole tensors and by blocks."""
    step = torch.tensor(10.0)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    held = [tiers.hold(torch.rand(numel).to(dtype), "host") for dtype in dtypes]

    def update(inputs: list[Any]) -> tuple[()]:
        parameter, gradient, first, second, low = inputs
        inputs.clear()
        cast = torch.ops.aten._to_copy.default(gradient, dtype=torch.float32)
        torch.ops.aten._fused_adamw_.default(
            [parameter], [cast], [first], [second], [], [step], amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8,
            lr=1e-3, maximize=False, weight_decay=0.01,
        )  # fmt: skip
        torch.ops.aten.copy_.default(low, parameter)
        return ()

    def run(function: Callable[[list[Any]], object]) -> None:
        states: list[Stored] = list(held)
        tiers.run_on_host(function, states, 0)
        tiers.settle_host(0)

    by_blocks = make_block_update(update, [stored.tensor for stored in held])
    return {"whole": partial(run, update), "blocks": partial(run, by_blocks)}


def measure(num_bytes: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each, round by round, and those of all threads' computation."""
    tiers, numel = Tiers(torch.device("cpu"), []), num_bytes // ARRAY_BYTES
    ways = {"copy": make_copy(num_bytes), **make_update(tiers, numel)}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for name in WAYS:
        ways[name]()  # the first touch of a page makes it
    for _ in range(num_rounds):
        for name in WAYS:
            began, computed = time.perf_counter(), time.process_time()
            ways[name]()
            rounds[name].append((time.perf_counter() - began, time.process_time() - computed))
    tiers.close()
    return rounds


def rows(rounds: dict[str, list[tuple[float, float]]], num_bytes: int) -> list[dict[str, Any]]:
    """For each way: bytes a second in the median and the best round, ns a parameter of the clock and of computation."""
    numel = num_bytes // ARRAY_BYTES
    result_rows = []
    for name, times in rounds.items():
        moved = num_bytes // 16 * 16 if name == "copy" else numel * BYTES_PER_PARAMETER
        clock, computed = [seconds for seconds, _ in times], [seconds for _, seconds in times]
        result_rows.append(
            {
                "way": name,
                "median": moved / statistics.median(clock),
                "best": moved / min(clock),
                "ns": None if name == "copy" else 1e9 * statistics.median(clock) / numel,
                "computed_ns": None if name == "copy" else 1e9 * min(computed) / numel,
            }
        )
    return result_rows


def table(result_rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    headers = ["", "GB/s, median", "GB/s, best", "ns a parameter, median", "ns of computation, best"]
    cells = [
        [row["way"], f"{row['median'] / 1e9:.2f}", f"{row['best'] / 1e9:.2f}"]
        + [("" if row[key] is None else f"{row[key]:.2f}") for key in ("ns", "computed_ns")]
        for row in result_rows
    ]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024, help="of all arrays of the update, and of the copy")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with turn(whole_machine=True):
        rounds = measure(options.megabytes << 20, options.rounds)
    result_rows = rows(rounds, options.megabytes << 20)
    shown = table(result_rows)
    print(shown)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"threads": options.threads, "num_bytes": options.megabytes << 20, "rows": result_rows, "rounds": rounds}
    (options.out / "host_update.json").write_text(json.dumps(data, indent=1))
    (options.out / "host_update.md").write_text(shown + "\n")


if __name__ == "__main__":
    main()
