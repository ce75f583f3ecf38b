"""Peaks next to step times of each contender, measured in turn, their table and their plot."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.lib.processes import Ranks

BASELINE = "torch.compile"


PEERS = ["dp:0.6", "dp:0.4", "dp:0.2", "dp:0.0", "greedy:0.6", "greedy:0.2", "ilp:0.6", "ilp:0.2"]


SHAPES = {
    "27m": {"vocab": 8192, "dim": 512, "depth": 6, "heads": 8, "sequence": 256, "batch": 8},
    "1b": {"vocab": 32_000, "dim": 2048, "depth": 20, "heads": 16, "sequence": 1024, "batch": 4},
    "tiny": {"vocab": 512, "dim": 32, "depth": 2, "heads": 2, "sequence": 64, "batch": 8},
}


@dataclass(frozen=True)
class Contender:
    """``family`` is what stands in the plot as one line; ``request`` is what the worker is told."""

    name: str
    family: str
    request: dict[str, Any]


@dataclass
class Result:
    """What was measured of one contender; ``rounds`` has the seconds and the CPU seconds of each step of each round."""

    contender: Contender
    facts: dict[str, Any]
    group: int
    rounds: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [wall for steps in self.rounds for wall, _ in steps]

    @property
    def cpu_seconds(self) -> list[float]:
        return [cpu for steps in self.rounds for _, cpu in steps]


def contenders(options: argparse.Namespace) -> list[Contender]:
    """All that was asked for but the baseline."""
    listed = []
    for peer in options.peers:
        solver, _, budget = peer.partition(":")
        request = {"family": "torch", "budget": float(budget), "solver": solver}
        listed.append(Contender(f"activation_memory_budget {budget} ({solver})", f"{solver} budget", request))
    listed.append(Contender("checkpoint per block", "checkpoint per block", {"family": "torch", "checkpoint": True}))
    listed.append(Contender("zerofx", "zerofx", {"family": "zerofx"}))
    for megabytes in options.budgets:
        request = {"family": "zerofx", "budget": float(megabytes)}
        listed += [Contender(f"zerofx, {megabytes} MB", "zerofx", request)]
    listed.append(Contender("zerofx, least", "zerofx", {"family": "zerofx", "budget": "least"}))
    return listed


def measure(options: argparse.Namespace) -> list[Result]:
    """The results of all contenders, group by group, and in each group those of the baseline."""
    listed, results = contenders(options), []
    # Neighbours on the frontier go into one group.
    for group, start in enumerate(range(0, len(listed), options.together)):
        together = [Contender(BASELINE, BASELINE, {"family": "torch"}), *listed[start : start + options.together]]
        results += measure_group(options, together, group)
    return results


def measure_group(options: argparse.Namespace, group: list[Contender], number: int) -> list[Result]:
    """Compile one contender after the other, then measure all in rounds."""
    workers: list[Ranks] = []
    results: dict[str, Result] = {}
    try:
        for contender in group:
            request = {"shape": SHAPES[options.shape], "device": options.device, "contender": contender.request}
            worker = Ranks(contender.name, "benchmarks.memory_frontier.worker", request, 1, options.threads)
            workers.append(worker)
            results[contender.name] = Result(contender, worker.read()[0], number)
            print(contender.name, results[contender.name].facts, flush=True)
        ready = [worker for worker in workers if "refused" not in results[worker.name].facts]
        for _ in range(options.rounds):
            for worker in ready:
                # The first step of a turn finds cold caches.
                results[worker.name].rounds.append(worker.run(options.steps + 1)[1:])
    finally:
        for worker in workers:
            worker.close()
    return list(results.values())


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """A row for each contender that ran, for the table and the plot."""
    bases = {result.group: result for result in results if result.contender.name == BASELINE}
    listed = []
    for result in results:
        if not result.rounds:
            continue
        base = bases[result.group]
        listed.append(
            {
                "contender": result.contender.name,
                "family": result.contender.family,
                "peak_mb": result.facts["peak_bytes"] / 1e6,
                "predicted_mb": result.facts.get("predicted_bytes", float("nan")) / 1e6,
                "min_seconds": min(result.seconds),
                "median_seconds": statistics.median(result.seconds),
                "min_cpu_seconds": min(result.cpu_seconds),
                "ratio": min(result.seconds) / min(base.seconds),
                "cpu_ratio": min(result.cpu_seconds) / min(base.cpu_seconds),
                "compile_seconds": result.facts["compile_seconds"],
            }
        )
    return listed


def table(results: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    listed = [
        [
            row["contender"],
            f"{row['peak_mb']:.0f}",
            "" if row["predicted_mb"] != row["predicted_mb"] else f"{row['predicted_mb']:.0f}",
            f"{row['min_seconds']:.3f}",
            f"{row['median_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['min_cpu_seconds']:.3f}",
            f"{row['cpu_ratio']:.2f}",
        ]
        for row in results
    ]
    headers = ["", "peak MB", "predicted MB", "min s", "median s", "ratio", "min CPU s", "CPU ratio"]
    return tabulate(listed, headers=headers, tablefmt="github", disable_numparse=True)


def plot(listed: list[dict[str, Any]], path: Path, *, on_cpu: bool = True) -> None:
    """Peak against time, a line for each family.

    ``on_cpu``: CPU seconds, which other processes change less; they say nothing of a GPU's time.
    """
    ratio, seconds = ("cpu_ratio", "CPU seconds") if on_cpu else ("ratio", "seconds")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for family in dict.fromkeys(row["family"] for row in listed):
        points = [(row["peak_mb"], row[ratio]) for row in listed if row["family"] == family]
        axes.plot(*zip(*points, strict=True), marker="o", label=family, linewidth=2 if family == "zerofx" else 1)
    axes.set_xlabel("peak above parameters and optimizer states, MB")
    axes.set_ylabel(f"{seconds} of a step, ratio to {BASELINE}")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
