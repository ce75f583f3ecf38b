"""Fine-tune all weights of a causal language model on one card, within the bytes that the card has.

python examples/tutorials/finetune_8b.py --model /models/Llama-3.1-8B --memory-budget 22GiB
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import zerofx
from small_llama import make_small_llama


def main(model_folder: str, args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(model_folder)
    with zerofx.empty_init(), device:  # no value exists until the step is built
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))

    step = zerofx.compile(
        model,
        optimizer,
        weights=model_folder,  # read bucket by bucket, straight into the tier that the plan says
        precision=zerofx.Precision("bf16", state_dtype="bf16"),
        memory_budget=args.memory_budget,
        accumulate=args.micro_batches,
        max_grad_norm=1.0,
        backend=args.backend,
    )
    run = zerofx.Run(step, args.output, every=100)  # goes on from its folder's latest checkpoint
    for number in run.steps(args.steps):
        tokens = next_batch(number, config.vocab_size, args).to(device)
        loss = step(input_ids=tokens, labels=tokens)
        print(f"step {number}: loss {loss.item():.3f}", flush=True)

    step.measure(input_ids=tokens, labels=tokens)  # trains three more steps, and measures them
    print(step)  # bytes and seconds: predicted, and measured
    with step.full_parameters():  # whole, in place: to save, or to generate with
        model.save_pretrained(Path(args.output) / "model")


def next_batch(number: int, vocab_size: int, args: argparse.Namespace) -> Tensor:
    """Tokens of one step, (micro-batches, length): in the place of a data set of yours."""
    draws = torch.Generator().manual_seed(number)
    return torch.randint(vocab_size, (args.micro_batches, args.length), generator=draws)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with a model of transformers (default: a small one, made here)")
    parser.add_argument("--memory-budget", help="the most bytes on the device, such as 22GiB")
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="of one sequence, in a step (default: %(default)s)"
    )
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="in all (default: %(default)s)")
    parser.add_argument("--output", default="runs/finetune_8b", help="folder of the run (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        args = parse_args()
        if args.model is None:
            make_small_llama().save_pretrained(folder)
        main(args.model or folder, args)
