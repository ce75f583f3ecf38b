"""Muon and AdamW on two gloo ranks: zerofx next to FSDP2 with gathered gradients, and to DDP, in turns of one run.

    torchrun --nproc-per-node 2 -m benchmarks.muon    # two minutes on two cores
    python -m benchmarks.muon --plan                  # Llama 8B on 8 and on 64 H100s, as simulated

A GPT of 27 million parameters, torch's Muon for the matrices of its layers and AdamW for the rest. With FSDP2 each rank
gathers gradients and momentum whole and orthogonalises all matrices, as people write it; with DDP it does so on its own
copies. Contenders take turns step by step, and the ratio of medians is what counts.

``--plan``: what an update of whole matrices adds to a step of 2^20 tokens in bfloat16, at most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerofx
from gpt import GPT

VOCAB, DIM, DEPTH, HEADS, BLOCK, BATCH = 4096, 512, 8, 8, 128, 4
TOKENS, LENGTH = 1 << 20, 8192


class GatheredMuon(torch.optim.Muon):
    """torch's Muon over sharded matrices: each rank gathers them whole, steps, and keeps its own part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Step on gathered copies."""
        for group in self.param_groups:
            for p in group["params"]:
                whole = nn.Parameter(p.full_tensor())
                whole.grad = p.grad.full_tensor()
                own = torch.optim.Muon([whole], lr=group["lr"], momentum=group["momentum"])
                if state := self.state.get(p):
                    own.state[whole]["momentum_buffer"] = state["momentum_buffer"].full_tensor()
                own.step()
                placed = {"device_mesh": p.device_mesh, "placements": p.placements}
                self.state[p]["momentum_buffer"] = _shard(own.state[whole]["momentum_buffer"], **placed)
                p.copy_(_shard(whole.detach(), **placed))


def _shard(whole: Tensor, **placed: Any) -> DTensor:
    """``whole``, which all ranks have, of which each keeps its part."""
    replicated = DTensor.from_local(whole, placed["device_mesh"], run_check=False)
    return replicated.redistribute(placements=placed["placements"])


def _optimizers(model: nn.Module, kind: type[torch.optim.Muon]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.get_submodule("layers").parameters() if p.dim() == 2]
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [kind(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, foreach=True)]


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK)


def _torch_step(model: nn.Module, kind: type[torch.optim.Muon]) -> Callable[..., Tensor]:
    optimizers, compiled = _optimizers(getattr(model, "module", model), kind), torch.compile(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = compiled(tokens, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def _contenders() -> dict[str, Callable[..., Tensor]]:
    ours = _model()
    sharded = _model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    return {
        "zerofx": zerofx.compile(ours, _optimizers(ours, torch.optim.Muon), stage=3),
        "FSDP2": _torch_step(sharded, GatheredMuon),
        "DDP": _torch_step(nn.parallel.DistributedDataParallel(_model()), torch.optim.Muon),
    }


def measure(num_steps: int) -> dict[str, list[float]]:
    """Seconds of each step by contender, after three to warm up."""
    torch.set_num_threads(1)
    contenders, generator = _contenders(), torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_steps + 3):
        batch = [torch.randint(0, VOCAB, (BATCH, BLOCK), generator=generator) for _ in range(2)]
        for name, step in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            loss = step(*batch)
            dist.barrier()
            if number >= 3:
                seconds[name].append(time.perf_counter() - begin)
            assert loss.isfinite()
    return seconds


def plan(num_ranks: int) -> tuple[object, ...]:
    """A row about Llama 8B: seconds of a step, of whole updates, of exchanges and what is exposed, and bytes sent."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    num = TOKENS // (num_ranks * LENGTH)
    tokens = torch.zeros(num, LENGTH, dtype=torch.int64)
    planned = zerofx.plan(
        model, optimizers, {"input_ids": tokens, "labels": tokens}, stage=3, world_size=num_ranks, machine="h100-sxm",
        precision="bf16", accumulate=num, memory_budget="75GiB",
    )  # fmt: skip
    rows = planned.schedule().rows
    updates = sum(row.seconds for row in rows if "update_whole" in row.op)
    exchanges = [row for row in rows if row.op.endswith(("to_owners", "from_owners"))]
    exposed = sum(row.exposed_seconds for row in rows if row.op.endswith("wait") and str(row.phase) == "update")
    step = planned.plan.step_seconds
    num_matrices = sum(p.numel() for p in matrices)
    bound = 4 * num_matrices / num_ranks
    sent = sum(row.wire_bytes for row in exchanges)
    return num_ranks, step, updates, exposed, (updates + exposed) / step, sent / 2**30, bound / 2**30


def main() -> None:
    """Measure, or plan, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", action="store_true")
    parsed = parser.parse_args()
    if parsed.plan:
        names = ["GPUs", "step s", "updates s", "exposed s", "of the step", "sent GiB", "2 x 2 x matrices / N"]
        print(tabulate([plan(8), plan(64)], headers=names, floatfmt=".4f"))
        return
    dist.init_process_group("gloo")
    seconds = measure(parsed.steps)
    if dist.get_rank():
        return
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rows = [(name, median, medians["zerofx"] / median) for name, median in medians.items()]
    print(tabulate(rows, headers=["", "seconds a step", "zerofx / it"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
