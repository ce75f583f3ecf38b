"""Memory against time of one process: zerofx under memory budgets, and PyTorch's own means to that end.

    python -m benchmarks.memory_frontier --rounds 5
    python -m benchmarks.memory_frontier --peers greedy:0.4 ilp:0.4 dp:0.4 --budgets 220 --rounds 2 --steps 2  # short

Contenders are processes that live side by side, each with its step compiled, as many as memory has room for and plain
``torch.compile`` among them; rounds go through all of them in turn, so that what else the machine does meets them
alike. Ratios are to that ``torch.compile``: of the least seconds of a step, and of the least CPU seconds of all its
threads, which hold also where other programs keep the cores busy (threads sleep while they wait).

Memory is the most that is allocated at a moment above parameters and optimizer states: for PyTorch in forward and
backward, gradients included; for zerofx in the whole step, update included.

    python -m benchmarks.memory_frontier --device cuda --shape 1b --budgets 20000 12000 8000 6000 --together 2

Writes ``benchmarks/results/memory_frontier.json``, a Markdown table and a plot (``pip install zerofx[benchmarks]``); on
CUDA to ``memory_frontier_cuda``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.lib.processes import RESULTS
from benchmarks.memory_frontier.measure import PEERS, SHAPES, measure, plot, rows, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each contender in a round")
    parser.add_argument("--together", type=int, default=8, help="contenders in memory at a time, besides the baseline")
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=[420, 340, 270, 220, 186, 150, 90], help="MB, for zerofx"
    )
    parser.add_argument("--peers", nargs="*", default=PEERS, metavar="SOLVER:BUDGET", help="activation_memory_budget")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("expected matplotlib for the plot, found none: pip install 'zerofx[benchmarks]'")
    results = measure(options)
    listed = rows(results)
    options.out.mkdir(parents=True, exist_ok=True)
    shown = table(listed)
    print(shown)
    refused = {r.contender.name: r.facts["refused"] for r in results if "refused" in r.facts}
    data = {
        "shape": SHAPES[options.shape],
        "threads": options.threads,
        "rows": listed,
        "refused": refused,
        "raw": [asdict(result) for result in results],
    }
    path = options.out / f"memory_frontier{'' if options.device == 'cpu' else '_cuda'}.json"
    path.write_text(json.dumps(data, indent=1))
    path.with_suffix(".md").write_text(shown + "\n")
    plot(listed, path.with_suffix(".png"), on_cpu=options.device == "cpu")


if __name__ == "__main__":
    main()
