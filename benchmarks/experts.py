"""Experts on four gloo ranks that share one computation: rows sent to their experts next to gathered tokens.

    torchrun --nproc-per-node 4 -m benchmarks.experts    # some minutes on two cores
    python -m benchmarks.experts --rate 200mbit          # each rank on a node of its own, as benchmarks.nodes has them
    torchrun --nproc-per-node 4 -m benchmarks.experts --hot    # all tokens of a batch have the same experts
    python -m benchmarks.experts --plan                  # Qwen3-30B-A3B on 8 H100s, as simulated; some minutes as well

A Mixtral of 28 million parameters, 16 experts a layer, of which 2 or 8 work for each token, on ``mesh={"model": 4}``:
with tokens gathered and each rank with columns of all experts, with ``shardings={"*experts*": "exchange"}``, and as a
plan has it unasked. They take turns step by step; ratios are of medians, of minima, and of processor seconds of all
ranks and of the busiest, which hold on a busy machine too.

``--hot``: batches of one token over and over, whose rows all are for the same 2 or 8 experts of a layer. Rows are sent,
with room for those of the busiest rank, or, with ``copied_experts=``, dealt to all ranks.

``--plan``: both, and FSDP, in bfloat16 with masters in float32, 4,096 tokens a GPU and step, within 72 GiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zerofx
from benchmarks.nodes import network, start

VOCAB, DIM, DEPTH, HEADS, EXPERTS, LENGTH = 4096, 256, 4, 4, 16, 256
WAYS: dict[str, dict[str, str]] = {
    "gathered": {"*.experts.gate_up_proj": "column", "*.experts.down_proj": "row"},
    "exchanged": {"*experts*": "exchange"},
    "unasked": {},
}
HOT: dict[str, tuple[str, ...]] = {"sent": (), "copied": ("copied_experts",)}  # options, of as many as work for a token
ROWS = ("row_capacity", "row_rounds", "row_shares", "copied_experts")
TOKENS, GPUS = 4096, 8
RANKS = 4  # on nodes of their own


def _step(top: int, dtype: torch.dtype, shardings: dict[str, str], options: dict[str, Any]) -> zerofx.Step:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=2 * DIM, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, num_local_experts=EXPERTS, num_experts_per_tok=top,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM._from_config(config, dtype=dtype)
    # Tokens that differ have other experts: routing is near even, as it is trained to be.
    nn.init.normal_(model.get_parameter("model.embed_tokens.weight"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mesh = {"model": dist.get_world_size()}
    return zerofx.compile(model, optimizer, 0, mesh=mesh, shardings=shardings, **options)


def measure(
    top: int, parsed: argparse.Namespace, options: dict[str, Any]
) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds of each step, and of the processors of all ranks, and of the busiest, by way, after four to warm up."""
    dtype, num_steps = getattr(torch, parsed.dtype), parsed.steps
    if parsed.hot:
        steps = {
            name: _step(top, dtype, WAYS["exchanged"], options | dict.fromkeys(more, top)) for name, more in HOT.items()
        }
    else:
        steps = {name: _step(top, dtype, WAYS[name], options) for name in parsed.ways}
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for number in range(num_steps + 4):
        ids = torch.randint(0, VOCAB, (parsed.sequences, LENGTH), generator=generator)
        ids = ids[:1, :1].expand_as(ids).contiguous() if parsed.hot else ids
        for name, step in steps.items():
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            step(input_ids=ids, labels=ids)
            spent = torch.tensor(time.process_time() - worked)
            most = spent.clone()
            dist.all_reduce(spent)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if number >= 4:
                seconds[name].append((time.perf_counter() - begin, spent.item(), most.item()))
    for name, step in steps.items():
        if not dist.get_rank():
            print(f"{top} experts a token, {name}: {step.plan.wire_bytes / 2**20:.1f} MiB sent, "
                  f"{step.plan.step_seconds:.3f} s, peak {step.plan.peak_bytes['device'] / 2**20:.1f} MiB, as planned, "
                  f"{step.num_repeated} steps run again; rows are "
                  f"{'sent' if step.plan.sends_rows else 'not sent'} to their experts", flush=True)  # fmt: skip
            numbers = {key: step.metrics[key] for key in ROWS if key in step.metrics}
            print("    " + ", ".join(f"{key} {number:.3g}" for key, number in numbers.items()), flush=True)
            print("    " + "; ".join({d.reason for d in step.plan.shardings if "experts with" in d.reason}))
        step.close()
    return seconds


def plan(name: str) -> tuple[object, ...]:
    """A row about Qwen3-30B-A3B: seconds of a step, those that are exposed, tokens a GPU and second, bytes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # its base class takes the rest
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=151936, max_position_embeddings=TOKENS, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(config)
    axis = "model" if name in WAYS else "shard"
    tokens = torch.zeros(GPUS if axis == "model" else 1, TOKENS, dtype=torch.int64)
    planned = zerofx.plan(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"input_ids": tokens, "labels": tokens}, stage=3,
        mesh={axis: GPUS}, machine="h100-sxm", precision="bf16", memory_budget="72GiB", shardings=WAYS.get(name),
    )  # fmt: skip
    step, exposed, peak = planned.plan.step_seconds, planned.plan.exposed_seconds, planned.plan.peak_bytes
    sizes = (peak["device"], peak.get("host", 0), planned.plan.wire_bytes)
    return name, step, exposed, f"{TOKENS / step:,.0f}", *(size / 2**30 for size in sizes)


def run_on_nodes(rate: str, arguments: Sequence[str]) -> None:
    """Run this benchmark's ranks on nodes of one rank each, which send at ``rate``.

    Raises:
        CalledProcessError: a rank has failed.
    """
    addresses = {"MASTER_ADDR": "10.231.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "net0"}
    places = {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with network(RANKS, rate) as nodes:
        ranks = [
            subprocess.Popen(
                [*start(node), sys.executable, "-m", "benchmarks.experts", "--measure-machine", *arguments],
                env={**os.environ, **addresses, **places, "RANK": str(rank)},
            )
            for rank, node in enumerate(nodes)
        ]
        try:
            for rank in ranks:
                if rank.wait():
                    raise subprocess.CalledProcessError(rank.returncode, rank.args)
        finally:
            for rank in ranks:
                rank.kill()


def main() -> None:
    """Measure, or plan, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, nargs="+", default=[2, 8], help="experts a token")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sequences", type=int, default=4, help="of 256 tokens, in a step of all ranks")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hot", action="store_true", help="tokens that all have the same experts")
    parser.add_argument("--budget", help="the memory budget of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--measure-machine", action="store_true", help="plan for the machine as it is measured first")
    parser.add_argument("--rate", help="of what leaves a node, as tc has it: start four ranks, each on one; needs root")
    parser.add_argument("--plan", choices=["FSDP", *WAYS], nargs="*", help="plan all, or some, in place of measuring")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    if parsed.plan is not None:
        headers = ["", "step s", "exposed s", "tokens/s/GPU", "peak GiB", "host GiB", "sent GiB"]
        rows = [plan(name) for name in parsed.plan or ("FSDP", *WAYS)]
        print(tabulate(rows, headers=headers, floatfmt=".3f", colalign=("left", *["right"] * 6)))
        return
    if parsed.rate is not None:
        run_on_nodes(parsed.rate, [a for a in sys.argv[1:] if a not in ("--rate", parsed.rate)])
        return
    dist.init_process_group("gloo")
    options = {
        "backend": parsed.backend,
        "memory_budget": parsed.budget,
        "machine": zerofx.Machine.measure() if parsed.measure_machine else None,
    }
    rows = []
    for top in parsed.top:
        seconds = measure(top, parsed, options)
        of_each = {
            name: (statistics.median(walls), min(walls), statistics.median(all_ranks), statistics.median(busiest))
            for name, (walls, all_ranks, busiest) in ((name, zip(*each, strict=True)) for name, each in seconds.items())
        }
        gathered = of_each["sent" if parsed.hot else "gathered"]
        rows += [
            (top, name, numbers[0], *(number / other for number, other in zip(numbers, gathered, strict=True)))
            for name, numbers in of_each.items()
        ]
    if not dist.get_rank():
        first = "of sent" if parsed.hot else "of gathered"
        headers = ["experts a token", "", "seconds a step", first, "minima", "of processors", "of the busiest"]
        print(tabulate(rows, headers=headers, floatfmt=".3f"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
