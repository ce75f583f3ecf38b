"""Plans with optimizer states on the host, for one GPU whose host and links are given, and a bound.

    python -m benchmarks.host_tier_plans                        # all rows, each planned in a process of its own
    python -m benchmarks.host_tier_plans --rows "1B in 6.2 GB"  # these alone; results of the others stay
    python -m benchmarks.host_tier_plans --rows                 # the table again, nothing is planned
    python -m benchmarks.host_tier_plans --shape llama-1b --budget 8e9 --update-rate 170e9      # one more, printed

Models are Llamas on ``meta``; nothing is computed, and nothing is measured but the planner's own time. The host is as
it was seen next to an H100: 120 GiB, 16 threads that update at 85 GB/s in all, and links of 49 GB/s each way, both at
once.

The bound is one that no plan within the budget is below, whatever it overlaps: the device holds at most the budget of
parameters, masters and states, and what is elsewhere of a parameter's states either goes up and down the links once or
is updated on the host, its gradient down and its new value up; what is elsewhere of parameters comes up once. It is the
longest of what links, host and computation then take, for the best division, and what computation takes without a
budget and without updates. It counts no activations, no workspace and no order.

Writes ``benchmarks/results/host_tier_plans.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate

import zerofx
from benchmarks.lib.alone import answer_alone
from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import SHAPES, make_batch, make_model
from benchmarks.lib.processes import RESULTS
from zerofx.ir.facts import Phase, origin
from zerofx.ir.streams import stream_of
from zerofx.scheduler.cost.machine import HostUpdate, Machine

_DIVISIONS = 2000  # of the parameters between the two ways of an update, for the bound


@dataclass(frozen=True)
class Row:
    """A model, a budget in bytes, and the seconds that its plan is held to; ``half``: whether all of it is bfloat16,
    and nothing has a master in float32. ``host_bytes``: of a host with more memory than that of the other rows."""

    name: str
    shape: str
    budget: float
    held_to: float | None = None
    layers: int | None = None
    half: bool = False
    max_grad_norm: float | None = None
    accumulate: int = 1
    order: Literal["auto", "micro-batch", "layer"] = "auto"
    host_bytes: int | None = None
    backend: Literal["inductor", "eager"] = "inductor"


ROWS = (
    Row("1B in 12.35 GB", "llama-1b", 12.35e9, 0.20),
    Row("1B in 12.35 GB, clipped", "llama-1b", 12.35e9, 0.22, max_grad_norm=1.0),
    Row("1B in 6.2 GB", "llama-1b", 6.2e9, 0.27),
    Row("1B in 4.1 GB", "llama-1b", 4.1e9, 0.30),
    Row("8B in 0.6 of its peak", "llama-8b", 35.36e9, 0.45, half=True),
    Row("8B in 22.8 GiB, 16 micro-batches", "llama-8b", 22.8 * 2**30, 4.68, accumulate=16, host_bytes=512 * 2**30),
    Row("8B in 22.8 GiB, 4 micro-batches", "llama-8b", 22.8 * 2**30, accumulate=4, host_bytes=512 * 2**30),
    Row(
        "the same 16, one after the other",
        "llama-8b",
        22.8 * 2**30,
        accumulate=16,
        order="micro-batch",
        host_bytes=512 * 2**30,
    ),
    Row("24B, 105 layers", "llama-8b", 78.2e9, 2.0, layers=105, half=True, backend="eager"),
)


@dataclass(frozen=True)
class Result:
    """A row's plan in numbers; ``planner_seconds`` are of computation."""

    step_seconds: float
    exposed_seconds: float
    bound_seconds: float
    peak_bytes: dict[str, int]
    busy_seconds: dict[str, float]
    updated_on: dict[str, int]
    planner_seconds: float


def machine_of(name: str, host_bytes: int, threads: int, update_rate: float, link_rate: float) -> Machine:
    """One GPU of a built-in row with another host: bytes, threads, bytes a second of updates and of each link."""
    machine = Machine.named(name).for_ranks(1)
    bandwidth = link_rate / machine.efficiency.link
    host = replace(
        machine.host,
        memory_bytes=host_bytes,
        to_host=replace(machine.host.to_host, bandwidth=bandwidth),
        to_device=replace(machine.host.to_device, bandwidth=bandwidth),
        update=HostUpdate(threads, update_rate, update_rate / threads),
    )
    return replace(machine, host=host)


def planned(row: Row, machine: Machine, budget: int | None) -> zerofx.PlannedStep:
    """The plan of a row's model within ``budget``; None for none."""
    shape = SHAPES[row.shape]
    shape = replace(shape, depth=row.layers or shape.depth, sequences=row.accumulate * shape.sequences)
    if row.host_bytes is not None:
        machine = replace(machine, host=replace(machine.host, memory_bytes=row.host_bytes))
    model = make_model(shape, torch.device("meta"), torch.bfloat16 if row.half else torch.float32)
    return zerofx.plan(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), make_batch(shape, torch.device("cpu")),
        stage=3, machine=machine, memory_budget=budget, offload="host" if budget is not None else "none",
        max_grad_norm=row.max_grad_norm, precision=None if row.half else "bf16", backend=row.backend,
        accumulate=row.accumulate, order=row.order,
    )  # fmt: skip


def measure(row: Row, machine: Machine) -> Result:
    """Plan a row here."""
    began = time.process_time()
    step = planned(row, machine, int(row.budget))
    seconds = time.process_time() - began
    prediction = step.plan.prediction
    assert prediction is not None, "what is planned on paper has been simulated"
    sides = [decision.update for decision in step.plan.states]
    return Result(
        step_seconds=prediction.step_seconds,
        exposed_seconds=prediction.exposed_seconds,
        bound_seconds=bound(row, machine),
        peak_bytes=dict(prediction.peak_bytes),
        busy_seconds=step.lowered.simulation.busy_by_stream,
        updated_on={side: sides.count(side) for side in ("host", "device")},
        planner_seconds=seconds,
    )


def bound(row: Row, machine: Machine) -> float:
    """Seconds that no plan of a row is below; see the module."""
    free = planned(row, machine, None)
    computed = sum(
        timing.seconds
        for node, timing in free.lowered.simulation.timings.items()
        if stream_of(node) == "compute" and origin(node).phase is not Phase.UPDATE
    )
    number = sum(bucket.shard_numel for bucket in free.layout.buckets)
    low, states = 2, 4 if row.half else 12
    elsewhere = (low + states) * number - row.budget
    link = machine.host.to_host.bandwidth * machine.efficiency.link
    touched = 2 * (states + (low if row.half else 0)) + low + (0 if row.half else low)
    best = float("inf")
    for division in range(_DIVISIONS + 1):
        on_host = number * division / _DIVISIONS
        # With less through the device than what must be elsewhere, parameters are elsewhere too.
        for through in {max(0.0, min(elsewhere / states, number) - on_host), 0.0}:
            parameters = max(0.0, elsewhere - states * (on_host + through))
            if parameters > low * number:
                continue
            up = states * through + max(low * on_host, parameters)
            down = states * through + low * on_host
            best = min(best, max(up / link, down / link, machine.host_seconds(0, int(touched * on_host))))
    return max(computed, best)


def table(results: Mapping[str, Result]) -> str:
    """The rows that there are, as Markdown."""
    rows = []
    for row in ROWS:
        result = results.get(row.name)
        if result is None:
            continue
        busy = (result.busy_seconds.get(lane, 0.0) for lane in ("compute", "to_device", "to_host", "host"))
        rows.append([
            row.name,
            f"{result.step_seconds:.3f}",
            "" if row.held_to is None else f"{row.held_to:.2f}",
            f"{result.bound_seconds:.3f}",
            f"{result.exposed_seconds:.3f}",
            " / ".join(f"{seconds:.3f}" for seconds in busy),
            " / ".join(f"{result.updated_on[side]}" for side in ("host", "device")),
            " / ".join(f"{result.peak_bytes.get(tier, 0) / 1e9:.2f}" for tier in ("device", "host")),
            f"{result.planner_seconds:.0f} s",
        ])  # fmt: skip
    headers = [
        "", "step, s", "held to", "bound", "exposed", "busy, s: computation / up / down / host",
        "buckets updated on host / device", "peak, GB: device / host", "planner, CPU time",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="all by default")
    parser.add_argument("--machine", default="h100-sxm", help="a built-in row, whose GPU it is")
    parser.add_argument("--host-bytes", type=float, default=120 * 2**30)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--update-rate", type=float, default=85e9, help="bytes a second of all threads together")
    parser.add_argument("--link-rate", type=float, default=49e9, help="bytes a second, each way at once")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="one row that is not in the table, printed")
    parser.add_argument("--budget", type=float, help="bytes on the device, for --shape")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    machine = machine_of(
        options.machine, int(options.host_bytes), options.threads, options.update_rate, options.link_rate
    )
    if options.shape:
        if options.budget is None:
            parser.error("--shape needs --budget")
        print(json.dumps(asdict(measure(Row(options.shape, options.shape, options.budget), machine)), indent=1))
        return
    by_name = {row.name: row for row in ROWS}
    if options.here:
        print(json.dumps(asdict(measure(by_name[options.here], machine))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "host_tier_plans.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {name: Result(**earlier[name]) for name in by_name if name in earlier}
    given = (
        "--machine", options.machine, "--host-bytes", str(options.host_bytes), "--threads", str(options.threads),
        "--update-rate", str(options.update_rate), "--link-rate", str(options.link_rate),
    )  # fmt: skip
    for name in by_name if options.rows is None else options.rows:
        answer = answer_alone(name, "benchmarks.host_tier_plans", *given, "--here", name, ZEROFX_CACHE_DIR="")
        results[name] = Result(**answer)
        write_json(path, {name: asdict(result) for name, result in results.items()})
    text = table(results)
    path.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
