"""What an arena takes next to what is live at once, planned for models without a budget and within some.

    python -m benchmarks.arena                          # 4 models, 3 budgets each, for one H100
    python -m benchmarks.arena --shapes llama-1b --shares 0.6

Nothing is computed: plans are made for a machine that need not be there, with what compiled regions are estimated to
hold. A share is of the peak that the model has without a budget. Writes ``benchmarks/results/arena.json`` and a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zerofx
from benchmarks.lib.alone import answer_alone
from benchmarks.lib.models import SHAPES, make_batch, make_model
from benchmarks.lib.processes import RESULTS
from zerofx.errors import MemoryBudgetError

HEADERS = (
    "model", "budget GB", "held throughout GB", "live in the pool GB", "pool GB", "more", "outside GB", "peak GB",
    "peak of what is live GB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", choices=sorted(SHAPES), default=["27m", "110m", "llama-1b", "llama-8b-8"]
    )
    parser.add_argument("--shares", nargs="*", type=float, default=[0.6, 0.4])
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", type=int, metavar="BYTES", help="one plan, in this process; 0 for no budget")
    args = parser.parse_args()
    if args.here is not None:
        print(json.dumps(row(args.shapes[0], args.machine, args.here or None)))
        return
    rows: list[dict[str, Any]] = []
    for name in args.shapes:
        budgets = [0]
        while budgets:
            budget = budgets.pop(0)
            asked = ("--shapes", name, "--machine", args.machine, "--here", str(budget))
            rows.append(answer_alone(f"{name} within {budget} bytes", "benchmarks.arena", *asked))
            if not budget:
                budgets = [int(share * rows[-1]["live_bytes"]) for share in args.shares]
            (args.out / "arena.json").write_text(json.dumps(rows, indent=1) + "\n")
            (args.out / "arena.md").write_text(table(rows) + "\n")
    print(table(rows))


def row(name: str, machine: str, budget: int | None) -> dict[str, Any]:
    """A model's step, planned with an arena within a budget in bytes."""
    shape, meta = SHAPES[name], torch.device("meta")
    model = make_model(shape, meta, torch.bfloat16)
    began = time.perf_counter()
    try:
        planned = zerofx.plan(
            model, torch.optim.AdamW(model.parameters()), make_batch(shape, meta), machine=machine,
            memory_budget=budget, offload="host", arena=True,
        )  # fmt: skip
    except MemoryBudgetError as error:
        return {"model": name, "budget": budget, "refused": str(error)}
    plan, arena = planned.plan, planned.plan.arena
    assert arena is not None, "it was asked for"
    return {
        "model": name, "budget": budget, "peak_bytes": plan.peak_bytes["device"],
        "live_bytes": planned.lowered.simulation.live.peak_live_bytes, "pool_bytes": arena.pool_bytes,
        "least_bytes": arena.least_bytes, "outside_bytes": arena.outside_bytes, "outside": arena.outside,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The results, a line for each plan."""

    def line(entry: dict[str, Any]) -> list[str]:
        budget = "none" if entry["budget"] is None else f"{entry['budget'] / 1e9:.3f}"
        if "refused" in entry:
            return [entry["model"], budget, "refused", *[""] * (len(HEADERS) - 3)]
        peak, pool, least = entry["peak_bytes"], entry["pool_bytes"], entry["least_bytes"]
        held = peak - pool - entry["outside_bytes"]
        sizes = [held, least, pool, entry["outside_bytes"], peak, entry["live_bytes"]]
        texts = [f"{size / 1e9:.3f}" for size in sizes]
        return [entry["model"], budget, *texts[:3], f"{pool / least - 1:.2%}", *texts[3:]]

    return tabulate([line(entry) for entry in rows], HEADERS, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
