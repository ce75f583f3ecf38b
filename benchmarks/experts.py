"""Experts on four gloo ranks that share one computation: rows sent to their experts next to gathered tokens.

    torchrun --nproc-per-node 4 -m benchmarks.experts    # some minutes on two cores

A Mixtral of 28 million parameters, 16 experts a layer, of which 2 or 8 work for each token, on ``mesh={"model": 4}``:
as a plan has it by default, and with ``shardings={"*experts*": "exchange"}``. The two take turns step by step; ratios
are of medians, of minima, and of processor seconds of all ranks, which hold on a busy machine too.
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
WAYS = {"gathered": {}, "exchanged": {"*experts*": "exchange"}}


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


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, nargs="+", default=[2, 8], help="experts a token")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=20)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
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
