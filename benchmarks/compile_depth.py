"""Time to compile against depth: zerofx's whole step compared with ``torch.compile`` of the whole model.

    python -m benchmarks.compile_depth                                  # 6 and 24 layers: some five minutes
    python -m benchmarks.compile_depth --depths 6 24 96 --rounds 1      # 96 layers of torch.compile take minutes alone

Each measurement is a process of its own, from model and batch to the end of the first step: cold with empty caches, and
warm with those that a cold start of the same program has left. Depths and contenders are interleaved. CPU seconds are
those of the process and of the compilers that it starts; they hold on a busy machine too.

Writes ``benchmarks/results/compile_depth.json``, as each measurement ends, and a Markdown table next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.lib.alone import answer_alone

RESULTS = Path(__file__).resolve().parent / "results"
CONTENDERS = ("zerofx", "torch.compile")

Found = dict[str, float]


def measure_here(contender: str, depth: int, width: int) -> Found:
    """Build one step and run it, in this process; seconds, CPU seconds, and counts of regions."""
    import torch
    import torch._inductor.compile_fx  # both need it, and importing it is no compiling

    import zerofx
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(256, width, depth, 4, 128)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = tuple(torch.randint(0, 256, (2, 128)) for _ in range(2))
    counts: Found = {}
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    if contender == "zerofx":
        step = zerofx.compile(model, optimizer, stage=3, example_batch=batch)
        compile_seconds = time.perf_counter() - began
        step(*batch)
        counts = {"regions": step.num_regions, "distinct_regions": step.num_distinct_regions}
        counts["compile_seconds"] = compile_seconds
    else:
        torch.compile(model)(*batch).backward()
        optimizer.step()
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - began_cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **counts}


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(contender: str, depth: int, width: int, cache: Path) -> Found:
    """The same in a fresh process with its caches in ``cache``."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "ZEROFX_CACHE_DIR": str(cache / "zerofx"),
        "TMPDIR": str(cache),  # Inductor's precompiled headers
    }
    asked = ("--here", contender, "--depths", str(depth), "--width", str(width))
    measured: Found = answer_alone(f"{contender} at {depth} layers", "benchmarks.compile_depth", *asked, **caches)
    return measured


def table(results: dict[str, dict[str, list[Found]]]) -> str:
    """``results``, by depth and by ``"zerofx cold"`` and so on, as Markdown; ratios are of medians."""
    first = next(iter(results.values()))
    rows = []
    for depth, runs in results.items():
        cold = _medians(runs["zerofx cold"])
        warm, peer = _medians(runs.get("zerofx warm", [])), _medians(runs.get("torch.compile cold", []))
        base = _medians(first["zerofx cold"])
        rows.append(
            [
                depth,
                f"{cold['regions']:.0f} / {cold['distinct_regions']:.0f}",
                *(_pair(runs) for runs in (cold, warm, peer)),
                *(_ratio(cold, base), _ratio(cold, peer), _ratio(warm, cold)),
            ]
        )
    headers = ["layers", "regions / distinct", "cold s", "warm s", "torch.compile s"]
    headers += [f"cold / {next(iter(results))} layers", "cold / torch.compile", "warm / cold"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _medians(runs: Sequence[Found]) -> Found:
    return {key: statistics.median(run[key] for run in runs) for key in (runs[0] if runs else ())}


def _pair(runs: Found) -> str:
    return f"{runs['seconds']:.1f} (CPU {runs['cpu_seconds']:.1f})" if runs else ""


def _ratio(runs: Found, other: Found) -> str:
    if not runs or not other:
        return ""
    return f"{runs['seconds'] / other['seconds']:.2f} (CPU {runs['cpu_seconds'] / other['cpu_seconds']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--without-peer", action="store_true", help="only zerofx")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(measure_here(options.here, options.depths[0], options.width)))
        return
    results: dict[str, dict[str, list[Found]]] = {str(depth): {} for depth in options.depths}
    options.out.mkdir(parents=True, exist_ok=True)

    def record(depth: int, kind: str, run: Found) -> None:
        results[str(depth)].setdefault(kind, []).append(run)
        (options.out / "compile_depth.json").write_text(json.dumps(results, indent=1))
        sys.stderr.write(f"{depth} layers, {kind}: {_pair(run)}\n")

    for _ in range(options.rounds):
        for depth in options.depths:
            with tempfile.TemporaryDirectory() as cache:
                for temperature in ("cold", "warm"):
                    record(depth, f"zerofx {temperature}", measure("zerofx", depth, options.width, Path(cache)))
            if not options.without_peer:
                with tempfile.TemporaryDirectory() as cache:
                    run = measure("torch.compile", depth, options.width, Path(cache))
                    record(depth, "torch.compile cold", run)
    text = table(results)
    (options.out / "compile_depth.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
