"""Predicted and measured seconds of a step on this machine's CPU, plan by plan, after ``Machine.measure()``.

    python -m benchmarks.step_times
    python -m benchmarks.step_times --models gpt --ranks 1 --shares 1 0 --rounds 2 --regions     # short, in detail

Models are the GPT and the unmodified HF Llama of 27M and the convolutional network of the examples; plans are those of
each stage without a budget (share 1), within a budget (0.6 of what the first takes above what lives throughout the
step) and within the least that can be met (0). All plans of a model are built in the same processes, from the machine
as these have measured it, and run in turn; measured is the median over the rounds of the slowest rank.

The order of two plans of a model on as many ranks counts where they differ by more than 5 % as measured.

Writes ``benchmarks/results/step_times.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.json_file import write_json
from benchmarks.processes import Ranks, device_name

RESULTS = Path(__file__).resolve().parent / "results"
WITHIN = 0.15  # of one, which predicted over measured is to be
APART = 0.05  # two plans that differ by less, as measured, have no order to predict
RIGHT = 0.9  # of the pairs, at least, of which the order is to be right


def measure(model: str, num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the plans of a model are predicted to take, and take, on ``num_ranks`` ranks."""
    request = {
        "model": model, "stages": options.stages, "shares": options.shares, "backend": options.backend,
    }  # fmt: skip
    name = f"{model}, {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    ranks = Ranks(name, "benchmarks.step_times_worker", request, num_ranks, options.threads)
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
    parser.add_argument("--regions", action="store_true", help="show where the time goes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    groups = []
    for model in options.models:
        for num_ranks in options.ranks:
            groups.append(measure(model, num_ranks, options))
            print(table(groups[-1:]), flush=True)
    text = f"{device_name('cpu')}, torch {torch.__version__}, {options.backend}, {options.threads} thread(s) a rank\n\n"
    text += f"{table(groups)}\n\n{conclusion(groups)}\n"
    options.out.mkdir(parents=True, exist_ok=True)
    name = "step_times" if options.backend == "inductor" else f"step_times_{options.backend}"
    write_json(options.out / f"{name}.json", {"backend": options.backend, "groups": groups})
    (options.out / f"{name}.md").write_text(text)
    print(region_tables(groups) if options.regions else "", text, sep="\n")


if __name__ == "__main__":
    main()
