"""Plan a step for GPUs that are not here: what it takes within several budgets, and why."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx


def main(args: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):  # shapes without memory
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.zeros(1, 4096, dtype=torch.long)  # the batch of one process
    batch = {"input_ids": tokens, "labels": tokens}

    planned = None
    for budget in args.budgets:
        try:
            planned = zerofx.plan(
                model,
                optimizer,
                batch,
                world_size=8,
                machine="h100-sxm",
                precision="bf16",
                memory_budget=budget,
            )
        except zerofx.MemoryBudgetError as error:
            print(f"{budget}: {error}")
            continue
        plan = planned.plan
        print(f"{budget}: peak {plan.peak_bytes['device'] / 2**30:.1f} GiB, step {plan.step_seconds * 1e3:.0f} ms")

    if planned is None:
        return
    print(planned)  # the last plan that was made, in a line: does it fit the machine
    print(planned.plan)  # every decision, with its price
    print(planned.plan.why("model.layers.0"))  # the decisions about one layer
    planned.schedule().to_html("plan.html")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument("--budgets", nargs="+", default=["64GB", "32GB", "24GB"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
