"""What ``mesh="auto"`` takes to choose, compared with one plan on one axis, and its choice with meshes by hand.

    python -m benchmarks.mesh_choice                                      # three Llamas: an hour on one core
    python -m benchmarks.mesh_choice --cases llama-8b                     # one of them: minutes
    python -m benchmarks.mesh_choice --cases llama-405b --plans FSDP chosen  # what was found of others stays

Nothing runs: each row is a plan of all layers for H100s, in a process of its own, in bfloat16 with fp32 masters, within
a budget. Its simulated seconds are by samples of all ranks, as ranks of the model axis share the batch of one. Plans by
hand pin what people do: nothing on the model axis (FSDP), replicas as well (HSDP), columns and rows with norms in
parts of the sequence (TP + SP), or tokens (Ulysses). Those with ``equal batch`` in their name are given as many times
the sequences as there are ranks on that axis, so that all ranks together have as many as in FSDP's step.

Writes ``benchmarks/results/mesh_choice.json``, as each plan ends, and a Markdown table next to it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

from benchmarks.layouts import MODELS, Pins, layouts, planned
from benchmarks.lib.alone import answer_alone
from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import Shape
from benchmarks.lib.processes import RESULTS
from zerofx.units import format_bytes, format_seconds

ONE, CHOSEN = "FSDP", "chosen"
AT_MOST_TIMES: Final = 3.0  # of the CPU seconds of one plan on one axis
AT_MOST_BYTES: Final = 4 << 30


@dataclass(frozen=True)
class Case:
    """A model on so many ranks; ``replicas``: those of plans by hand with replicas."""

    shape: Shape
    num_ranks: int
    replicas: tuple[int, ...]


CASES: Final[Mapping[str, Case]] = {
    "llama-8b": Case(replace(MODELS["llama"].shape, depth=32), 8, (2, 4)),
    "llama-70b": Case(
        Shape("llama", 128_256, 8192, 80, 64, tokens=8192, sequences=1, inner=28_672, num_kv_heads=8), 1024, (2, 8, 32)
    ),
    "llama-405b": Case(
        Shape("llama", 128_256, 16_384, 126, 128, tokens=8192, sequences=1, inner=53_248, num_kv_heads=8), 1024, (2, 8)
    ),
}


@dataclass(frozen=True)
class ByHand:
    """What is asked for: a mesh, pins of what lies on its model axis, and how many times the sequences there are."""

    mesh: dict[str, int] | str
    pins: Pins
    times: int = 1


def plans_of(case: Case) -> dict[str, ByHand]:
    """Every plan of a case by name, the chosen one among them."""
    plans = {ONE: ByHand({"shard": case.num_ranks}, {}), CHOSEN: ByHand("auto", {})}
    for replicas in case.replicas:
        plans[f"HSDP, {replicas} replicas"] = ByHand({"replicate": replicas, "shard": case.num_ranks // replicas}, {})
    named, features = layouts(replace(MODELS["llama"], shape=case.shape)), "tensor and sequence parallel"
    shared = (("TP 2 + SP", 2, features), ("TP 4 + SP", 4, features), ("TP 8 + SP", 8, features))
    for title, ranks, layout in (*shared, ("Ulysses 8", 8, "tokens")):
        by_hand = ByHand({"shard": case.num_ranks // ranks, "model": ranks}, named[layout])
        plans[f"{title} + FSDP"] = by_hand
        plans[f"{title} + FSDP, equal batch"] = replace(by_hand, times=ranks)
    return plans


def measure_here(case: Case, asked: ByHand, budget: str) -> dict[str, Any]:
    """Plan in this process: CPU seconds, the most memory, and what the plan says of a step."""
    import zerofx

    shape = replace(case.shape, sequences=case.shape.sequences * asked.times)
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        step = planned(shape, asked.pins, mesh=asked.mesh, world_size=case.num_ranks, memory_budget=budget)
    except zerofx.MemoryBudgetError as error:
        outcome: dict[str, Any] = {"refused": str(error).splitlines()[0]}
    else:
        plan = step.plan
        samples = shape.sequences * case.num_ranks // plan.mesh.model
        outcome = {
            "mesh": str(plan.mesh), "step_seconds": plan.step_seconds,
            "seconds_per_sample": plan.step_seconds / samples,
            "exposed_seconds": plan.exposed_seconds, "peak_bytes": plan.peak_bytes["device"],
            "comparison": str(step.comparison or ""),
        }  # fmt: skip
    outcome["seconds"], outcome["cpu_seconds"] = time.perf_counter() - began, time.process_time() - began_cpu
    outcome["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return outcome


def measure(case: str, plan: str, budget: str) -> dict[str, Any]:
    """The same in a process of its own, which finds nothing that another has kept on disk."""
    asked = ("--here", "--cases", case, "--plans", plan, "--budget", budget)
    outcome: dict[str, Any] = answer_alone(f"{case}, {plan}", "benchmarks.mesh_choice", *asked, ZEROFX_CACHE_DIR="0")
    return outcome


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """``results``, by case and plan, as Markdown: what choosing took, and what each plan takes for a sample."""
    choosing, taken = [], []
    for case, plans in results.items():
        single, chosen = plans.get(ONE, {}), plans.get(CHOSEN, {})
        if single and chosen:
            times = chosen["cpu_seconds"] / single["cpu_seconds"]
            choosing.append(
                [case, f"{single['cpu_seconds']:.0f}", f"{chosen['cpu_seconds']:.0f}", f"{times:.2f}"]
                + [format_bytes(outcome["resident_bytes"]) for outcome in (single, chosen)]
            )
        taken += [[case, name, *_numbers(outcome, chosen)] for name, outcome in plans.items()]
    times = ["", "one axis CPU s", "all meshes CPU s", "times", "one axis resident", "all meshes resident"]
    columns = ["", "plan", "mesh", "a sample", "of the chosen", "step", "exposed", "peak"]
    return "\n\n".join(
        tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
        for rows, headers in ((choosing, times), (taken, columns))
    )


def _numbers(outcome: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    if "refused" in outcome:
        return ["", "", "", "", "", "does not fit"]
    least = chosen.get("seconds_per_sample")
    return [
        outcome["mesh"], format_seconds(outcome["seconds_per_sample"]),
        f"{outcome['seconds_per_sample'] / least:.3f}" if least else "", format_seconds(outcome["step_seconds"]),
        format_seconds(outcome["exposed_seconds"]), format_bytes(outcome["peak_bytes"]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help="some of the plans, by what the table calls them")
    parser.add_argument("--budget", default="70GiB", help="of each device's memory")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        case = CASES[options.cases[0]]
        print(json.dumps(measure_here(case, plans_of(case)[options.plans[0]], options.budget)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "mesh_choice.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for case in options.cases:
        for plan in plans_of(CASES[case]):
            if options.plans is None or plan in options.plans:
                results.setdefault(case, {})[plan] = measure(case, plan, options.budget)
                write_json(path, results)
                sys.stderr.write(f"{case}, {plan}: {results[case][plan]['cpu_seconds']:.0f} CPU s\n")
    text = table(results)
    path.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
