"""One rank of ``benchmarks/step_times/``: measures the machine, builds all plans of a model, and runs them in turn.

    python -m benchmarks.step_times.worker '{"model": "gpt", "stages": [0, 3], "shares": [1.0, 0.6, 0.0], ...}'

Prints what is predicted of each plan as a line of JSON, and then runs as many steps of each plan as each line on stdin
says, answering with the seconds of each by plan; where it says ``regions``, with those of its regions. A share is of
what the plan without a budget takes above what lives throughout the step; 0.0 asks for the least that any plan takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from benchmarks.lib.memory_kept import keep_freed_memory
from benchmarks.lib.models import SHAPES, make_workload
from benchmarks.peers.worker import join, meet
from zerofx.codegen.regions import regions_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.search.problem import BudgetMissedError

SEQUENCES = 4  # of one rank, of 256 tokens
WIDTH, IMAGES = 64, 256  # of the CNN's first stage; images of one rank
REGIONS = 12  # those that take longest, listed where they are asked for


class Case:
    """One model as it is trained here, made anew for each plan."""

    def __init__(self, name: str, rank: int) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, torch.Tensor] = {}
        self.options: dict[str, Any] = {}
        torch.manual_seed(0)
        if name == "cnn":
            from train_convnet import convnet, stripes  # of the examples' folder

            self.model: nn.Module = convnet(WIDTH)
            self.arguments = stripes(IMAGES, torch.Generator().manual_seed(rank))
            self.options = {"loss_fn": nn.CrossEntropyLoss()}
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            shape = replace(SHAPES[{"gpt": "27m"}.get(name, name)], sequences=SEQUENCES)
            work = make_workload(shape, torch.device("cpu"), torch.float32, rank)
            self.model, self.keywords = work.model, work.batch
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def build(self, stage: int, budget: int | None, backend: Any, machine: Machine) -> zerofx.Step:
        """The step within a budget in bytes; None for no limit."""
        step = zerofx.compile(
            self.model, self.optimizer, stage, memory_budget=budget, backend=backend, machine=machine, **self.options
        )
        step.prepare(*self.arguments, **self.keywords)
        return step

    def run(self, step: zerofx.Step) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        step(*self.arguments, **self.keywords)
        return time.perf_counter() - began


def build_all(request: dict[str, Any], machine: Machine, rank: int) -> list[tuple[str, Case, zerofx.Step]]:
    """The plans of each stage from the largest budget to the least; budgets that lead to the same decisions once."""
    built = []
    for stage in request["stages"]:
        decisions: set[str] = set()
        least = whole = 0
        for share in request["shares"]:
            case = Case(request["model"], rank)
            budget = None if share == 1.0 else least + int(share * (whole - least))
            while True:
                try:
                    step = case.build(stage, budget, request["backend"], machine)
                    break
                except BudgetMissedError as error:
                    assert budget is not None
                    budget = max(error.least_bytes, budget + 1)
                    case = Case(request["model"], rank)
            if share == 1.0:
                whole = step.plan.peak_bytes["device"]
                least = step.compiled.lowered.simulation.live.persistent_bytes
            if step.plan.decisions_hash() in decisions:
                step.close()
                continue
            decisions.add(step.plan.decisions_hash())
            built.append((f"stage {stage}, {'least' if share == 0.0 else share}", case, step))
    return built


def regions(case: Case, step: zerofx.Step) -> list[dict[str, Any]]:
    """The distinct regions that take longest: calls in a step, predicted and measured seconds of one call."""
    measured = step.measure(*case.arguments, num_steps=4, **case.keywords)
    timings = step.compiled.lowered.simulation.timings
    listed = regions_of(step.compiled.lowered.instructions)
    calls = Counter(region.key for region in listed)
    rows: list[dict[str, Any]] = [
        {
            "name": f"{region.unit or 'the model'}, {region.origin.phase}",
            "calls": calls[region.key],
            "predicted": sum(timings[node].seconds for node in region.own),
            "measured": measured.region_seconds.get(region.key, 0.0),
        }
        for region in {region.key: region for region in reversed(listed)}.values()
    ]
    waits = {"name": "waits", "calls": 1, "predicted": step.plan.exposed_seconds, "measured": measured.exposed_seconds}
    between = {"name": "between", "calls": 1, "predicted": 0.0, "measured": measured.between_seconds}
    return [*sorted(rows, key=lambda row: -row["calls"] * row["measured"])[:REGIONS], waits, between]


def main() -> None:
    # Libraries write to stdout what they like; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    if request["keep_memory"] and not keep_freed_memory():
        raise SystemExit("expected glibc, whose memory can be kept, found another C library: leave --keep-memory out")
    join("cpu", alone=True)
    rank = int(os.environ["RANK"])
    began = time.perf_counter()
    machine = Machine.measure("cpu")
    measuring = time.perf_counter() - began
    built = build_all(request, machine, rank)
    plans = {name: {"predicted": step.plan.step_seconds} for name, _, step in built}
    answers.write(json.dumps({"measuring": measuring, "machine": machine.to_json(), "plans": plans}) + "\n")
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        for name, case, step in built:
            meet()
            regions_too = line.strip() == "regions"
            answer[name] = regions(case, step) if regions_too else [case.run(step) for _ in range(int(line))]
        answers.write(json.dumps(answer) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
