"""What each extra for CPUs (``codegen/cpu/extras.py``) saves of a step: on and off in turn, in one run.

    python -m benchmarks.cpu_extras                                     # all: a quarter of an hour on two idle cores
    python -m benchmarks.cpu_extras --shapes 27m --only products
    python -m benchmarks.cpu_extras --report                            # the table from what was measured before

An extra that acts in one process is measured in processes of one thread, one that acts between ranks at stage 3 on two
ranks of one thread each: some with the extra and some without, side by side, that run one step in turn. What is
reported is the median of the rounds' ratios, of seconds by the clock (of the slowest rank) and of CPU seconds (of all
ranks), which hold on a busy machine too.

Each pair is written as soon as it is measured, to ``benchmarks/results/cpu_extras.json`` in the place of what is there
of it; a Markdown table is made of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import RESULTS, Ranks, device_name
from benchmarks.peers.measure import record, say
from zerofx.codegen.cpu.extras import CHANNELS, CPU_KERNELS, EXTRAS, SHARED_BUCKETS, Extra

SHAPES_OF_27M = ("27m", "llama")
_BETWEEN_RANKS = (CHANNELS, SHARED_BUCKETS)

Step = list[float]  # its seconds and CPU seconds
Round = list[Step]  # one step with the extra, one without it


def environments(extra: Extra) -> tuple[dict[str, str], dict[str, str]]:
    """What is set with ``extra`` in use, and without it and nothing else."""
    if extra.name in CPU_KERNELS:
        used = [",".join(sorted(names)) or "none" for names in (CPU_KERNELS, CPU_KERNELS - {extra.name})]
        return {extra.switch: used[0]}, {extra.switch: used[1]}
    return {extra.switch: ""}, {extra.switch: extra.name}


def measure(extra: Extra, shape: str, num_rounds: int, cache: Path) -> list[Round]:
    """Rounds of ``extra``'s pair."""
    num_ranks = 2 if extra.name in _BETWEEN_RANKS else 1
    contender = {"family": "zerofx", "stage": 3 if num_ranks > 1 else 0}
    measured = {"shape": shape, "device": "cpu", "dtype": "float32", "contender": contender}
    pair: list[Ranks] = []
    rounds: list[Round] = []
    try:
        for variables in environments(extra):
            # Kept steps are found by what was asked for: each is to be made as it is asked for here.
            own = {"ZEROFX_CACHE_DIR": "0", **variables}
            pair.append(Ranks(extra.name, "benchmarks.peers.worker", measured, num_ranks, 1, cache, own))
            pair[-1].read()
        for number in range(num_rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            steps = {which: pair[which].run(1)[0] for which in order}
            rounds.append([list(steps[0]), list(steps[1])])
    finally:
        for ranks in pair:
            ranks.close()
    return rounds[1:]  # the first finds cold caches


def ratios(rounds: Sequence[Round]) -> tuple[float, float]:
    """Seconds, and CPU seconds, of a step without the extra over those of one with it: medians over the rounds."""
    wall, cpu = ([without[which] / used[which] for used, without in rounds] for which in (0, 1))
    return statistics.median(wall), statistics.median(cpu)


def table(pairs: Mapping[str, Mapping[str, Any]]) -> str:
    """What was measured, as Markdown."""
    lines = []
    for pair in pairs.values():
        wall, cpu = ratios(pair["rounds"])
        saved = f"{1 - 1 / cpu:.1%}"
        lines.append([pair["extra"], pair["shape"], f"{wall:.3f}", f"{cpu:.3f}", saved, len(pair["rounds"])])
    headers = ["extra", "model", "seconds without / with", "CPU seconds", "saved of a step's CPU time", "rounds"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def keep(path: Path, pair: dict[str, Any]) -> None:
    """Write what was measured of a pair in the place of what is there of it."""

    def change(data: dict[str, Any]) -> None:
        data["runs"][f"{pair['extra']}, {pair['shape']}"] = pair

    record(path, change)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES_OF_27M)
    parser.add_argument("--only", nargs="+", choices=[extra.name for extra in EXTRAS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=16, help="steps of each kind")
    parser.add_argument("--cache", type=Path, help="Inductor's cache (default: an empty one)")
    parser.add_argument("--report", action="store_true", help="only make the table again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.out / "cpu_extras.json"
    with tempfile.TemporaryDirectory() as empty:
        for extra in () if options.report else EXTRAS:
            for shape in options.shapes if not options.only or extra.name in options.only else ():
                rounds = measure(extra, shape, options.rounds, options.cache or Path(empty))
                pair = {
                    "extra": extra.name,
                    "shape": shape,
                    "machine": device_name("cpu"),
                    "torch": torch.__version__,
                    "load": os.getloadavg(),
                    "rounds": rounds,
                }
                keep(path, pair)
                say(f"{shape} without {extra.name}: {ratios(rounds)}")
    pairs = json.loads(path.read_text())["runs"]
    path.with_suffix(".md").write_text(table(pairs) + "\n")
    print(table(pairs))


if __name__ == "__main__":
    main()
