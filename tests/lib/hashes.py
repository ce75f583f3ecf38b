"""Started as by torchrun: writes hashes of what this rank plans, and of what it compiles, into a folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.lib.budgets import Waves


def training() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = Waves()
    return model, torch.optim.AdamW(model.parameters()), (torch.zeros(64, 64),)


def planned_alone() -> zerofx.Plan:
    """A plan for two ranks that no rank hears of from another: values are computed again, and parameters gathered."""

    def within(budget: int | None) -> zerofx.Plan:
        return zerofx.plan(*training(), world_size=2, machine="cpu", backend="eager", memory_budget=budget).plan

    made = within(within(None).peak_bytes["device"] - 64)
    assert made.recomputes and made.gathers
    return made


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model, optimizer, batch = training()
    alone = planned_alone()
    step = zerofx.compile(model, optimizer, backend="eager", example_batch=batch, memory_budget=alone.memory_budget)
    found = {
        "planned alone": alone.decisions_hash(),
        "compiled": step.plan.decisions_hash(),
        "source": hashlib.sha256(step.source.encode()).hexdigest(),
        "graph": step.plan.graph,
        "threads": torch.get_num_threads(),
        "hash of a word": hash("word"),
        "mark": os.environ.get("UNRELATED", ""),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
