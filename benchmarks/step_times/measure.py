"""Predicted next to measured seconds of the plans of a model, and their tables."""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

from tabulate import tabulate

from benchmarks.lib.processes import Ranks

WITHIN = 0.15  # of one, which predicted over measured is to be


APART = 0.05  # two plans that differ by less, as measured, have no order to predict


RIGHT = 0.9  # of the pairs, at least, of which the order is to be right


def measure(model: str, num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the plans of a model are predicted to take, and take, on ``num_ranks`` ranks."""
    request = {
        "model": model, "stages": options.stages, "shares": options.shares, "backend": options.backend,
        "keep_memory": options.keep_memory,
    }  # fmt: skip
    name = f"{model}, {num_ranks} rank{'s' if num_ranks > 1 else ''}{', memory kept' if options.keep_memory else ''}"
    ranks = Ranks(name, "benchmarks.step_times.worker", request, num_ranks, options.threads)
    try:
        facts = ranks.read()[0]
        rounds = []
        for _ in range(options.rounds + 1):
            ranks.send(str(options.steps))
            answers = ranks.read()
            rounds.append(
                {plan: [max(times) for times in zip(*(a[plan] for a in answers), strict=True)] for plan in answers[0]}
            )
        regions = {}
        if options.regions:
            ranks.send("regions")
            regions = ranks.read()[0]
    finally:
        ranks.close()
    for plan, entry in facts["plans"].items():
        seconds = [time for answer in rounds[1:] for time in answer[plan]]  # the first round warms up
        entry.update(seconds=seconds, measured=statistics.median(seconds), regions=regions.get(plan, []))
    return {"name": name, **facts}


def pairs(groups: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Two plans of a group that differ as measured, and whether their predicted order is the measured one."""
    ordered = []
    for group in groups:
        for (first, a), (second, b) in itertools.combinations(group["plans"].items(), 2):
            if max(a["measured"], b["measured"]) > (1 + APART) * min(a["measured"], b["measured"]):
                right = (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"])
                ordered.append((f"{group['name']}, {first}", f"{group['name']}, {second}", right))
    return ordered


def table(groups: list[dict[str, Any]]) -> str:
    """A line for each plan."""
    lines = [
        [
            f"{group['name']}, {plan}",
            f"{1e3 * entry['predicted']:.1f}",
            f"{1e3 * entry['measured']:.1f}",
            f"{1e3 * min(entry['seconds']):.1f}",
            f"{entry['predicted'] / entry['measured']:.3f}",
        ]
        for group in groups
        for plan, entry in group["plans"].items()
    ]
    headers = ["", "predicted ms", "measured ms", "fastest ms", "predicted / measured"]
    align = ("left", "right", "right", "right", "right")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=align)


def conclusion(groups: list[dict[str, Any]]) -> str:
    """How many of the predictions hold, in words."""
    ratios = [entry["predicted"] / entry["measured"] for group in groups for entry in group["plans"].values()]
    near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    ordered = pairs(groups)
    right = sum(is_right for *_, is_right in ordered)
    seconds = max(group["measuring"] for group in groups)
    return (
        f"{near} of {len(ratios)} plans are predicted within {WITHIN:.0%} ({min(ratios):.3f} to {max(ratios):.3f}); of "
        f"{len(ordered)} pairs of plans that differ by over {APART:.0%} the order of {right} is predicted right (at "
        f"least {RIGHT:.0%} are to be); Machine.measure() took at most {seconds:.0f} s"
    )


def region_tables(groups: list[dict[str, Any]]) -> str:
    """Where the time of each plan goes, region by region."""
    texts = []
    for group in groups:
        for plan, entry in group["plans"].items():
            lines = [
                [
                    row["name"],
                    str(row["calls"]),
                    f"{1e3 * row['predicted']:.2f}",
                    f"{1e3 * row['measured']:.2f}",
                    f"{1e3 * row['calls'] * (row['predicted'] - row['measured']):+.2f}",
                ]
                for row in entry["regions"]
            ]
            headers = ["region", "calls", "predicted ms", "measured ms", "off in all ms"]
            text = tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * 4))
            texts.append(f"{group['name']}, {plan}\n{text}")
    return "\n\n".join(texts)
