"""Experts on four gloo ranks that share one computation: rows sent to their experts next to gathered tokens.

    torchrun --nproc-per-node 4 -m benchmarks.experts    # some minutes on two cores
    python -m benchmarks.experts --plan                  # Qwen3-30B-A3B on 8 H100s, as simulated; some minutes as well

A Mixtral of 28 million parameters, 16 experts a layer, of which 2 or 8 work for each token, on ``mesh={"model": 4}``:
as a plan has it by default, and with ``shardings={"*experts*": "exchange"}``. The two take turns step by step; ratios
are of medians, of minima, and of processor seconds of all ranks, which hold on a busy machine too.

``--plan``: both, and FSDP, in bfloat16 with masters in float32, 4,096 tokens a GPU and step, within 72 GiB.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zerofx

VOCAB, DIM, DEPTH, HEADS, EXPERTS, SEQUENCES, LENGTH = 4096, 256, 4, 4, 16, 4, 256
WAYS: dict[str, dict[str, str]] = {"gathered": {}, "exchanged": {"*experts*": "exchange"}}
TOKENS, GPUS = 4096, 8


def _step(top: int, dtype: torch.dtype, shardings: dict[str, str]) -> zerofx.Step:
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
    return zerofx.compile(model, optimizer, 0, mesh=mesh, shardings=shardings, backend="eager")


def measure(top: int, dtype: torch.dtype, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step, and of the processors of all ranks, by way, after four to warm up."""
    steps = {name: _step(top, dtype, shardings) for name, shardings in WAYS.items()}
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(num_steps + 4):
        ids = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
        for name, step in steps.items():
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            step(input_ids=ids, labels=ids)
            spent = torch.tensor(time.process_time() - worked)
            dist.all_reduce(spent)
            if number >= 4:
                seconds[name].append((time.perf_counter() - begin, spent.item()))
    for name, step in steps.items():
        if not dist.get_rank():
            print(f"{top} experts a token, {name}: {step.plan.wire_bytes / 2**20:.1f} MiB sent, as planned, "
                  f"{step.num_repeated} steps run again", flush=True)  # fmt: skip
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


def main() -> None:
    """Measure, or plan, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, nargs="+", default=[2, 8], help="experts a token")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", choices=["FSDP", *WAYS], nargs="*", help="plan all, or some, in place of measuring")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    if parsed.plan is not None:
        headers = ["", "step s", "exposed s", "tokens/s/GPU", "peak GiB", "host GiB", "sent GiB"]
        rows = [plan(name) for name in parsed.plan or ("FSDP", *WAYS)]
        print(tabulate(rows, headers=headers, floatfmt=".3f", colalign=("left", *["right"] * 6)))
        return
    dist.init_process_group("gloo")
    rows = []
    for top in parsed.top:
        seconds = measure(top, getattr(torch, parsed.dtype), parsed.steps)
        of_each = {
            name: (statistics.median(wall for wall, _ in each), min(each)[0], statistics.median(cpu for _, cpu in each))
            for name, each in seconds.items()
        }
        gathered = of_each["gathered"]
        rows += [
            (top, name, numbers[0], *(number / other for number, other in zip(numbers, gathered, strict=True)))
            for name, numbers in of_each.items()
        ]
    if not dist.get_rank():
        headers = ["experts a token", "", "seconds a step", "of gathered", "minima", "of processors"]
        print(tabulate(rows, headers=headers, floatfmt=".3f"))


if __name__ == "__main__":
    main()
