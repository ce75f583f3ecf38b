"""Train a small GPT on the source of Python's standard library, its parameters, gradients and optimizer sharded.

python examples/train_gpt.py
torchrun --nproc-per-node 2 examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor
from tqdm import tqdm

import zerofx
from common import World, join_world
from gpt import GPT, generate
from text import VOCAB, batches, decode, encode, load_source, unigram_entropy, validation_batches

DIM, DEPTH, HEADS, BLOCK = 128, 4, 4, 128  # BLOCK is in bytes of text
BATCH_SIZE = 16  # sequences per process and step
LEARNING_RATE, WARMUP_STEPS = 2e-3, 30


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    train, validation = load_source()
    model = GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate_factor(done, args.steps))
    stream = batches(train, BLOCK, BATCH_SIZE, rank=world.rank, world_size=world.size)

    def next_batch() -> tuple[Tensor, Tensor]:
        tokens, targets = next(stream)
        return tokens.to(world.device), targets.to(world.device)

    batch = next_batch()
    world.print(f"compiling stage {args.stage} for {world.size} process(es), backend {args.backend} ...")
    started = time.perf_counter()
    step = zerofx.compile(
        model, optimizer, stage=args.stage, example_batch=batch, precision=args.precision, backend=args.backend
    )
    loss = step(*batch)  # the first call compiles the kernels
    scheduler.step()
    world.print(f"ready after {time.perf_counter() - started:.1f} s\n\n{step}\n\n{step.schedule()}\n")

    progress = tqdm(range(1, args.steps), desc="training", unit="step", mininterval=1.0, disable=world.rank != 0)
    started = time.perf_counter()
    for done in progress:
        loss = step(*next_batch())
        scheduler.step()
        if done % 10 == 0:  # reading the loss waits for the device, so not at every step
            speed = done * BATCH_SIZE * BLOCK * world.size / (time.perf_counter() - started)
            progress.set_postfix(loss=f"{loss.item():.3f}", tokens_per_s=f"{speed:,.0f}")

    with step.full_parameters():  # all processes gather the parameters together
        model.eval()
        nats = world.mean(validation_loss(model, validation, world))
        sample = decode(generate(model, encode("def ").to(world.device), 300))
        model.train()
    predicted = step.plan.peak_bytes["device"]
    measured = step.measure(*batch, num_steps=3).peak_bytes["device"]

    world.print(f"\n{sample}\n")
    world.print(f"validation loss   {nats:.3f} nats/byte")
    world.print(f"unigram entropy   {unigram_entropy(validation):.3f} nats/byte (a model that ignores the context)")
    world.print(f"predicted peak    {predicted / 2**20:.2f} MiB on each device")
    world.print(f"measured peak     {measured / 2**20:.2f} MiB ({(measured - predicted) / predicted:+.1%})")
    world.print(f"generated step    {step.source_path}")


def learning_rate_factor(done: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth, as a factor of the learning rate after `done` of `steps` steps."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(done / max(steps, 1), 1.0))
    return min((done + 1) / WARMUP_STEPS, 0.1 + 0.9 * cosine)


@torch.no_grad()
def validation_loss(model: GPT, data: Tensor, world: World) -> float:
    """Mean loss in nats per byte over this process's share of the validation batches."""
    losses = [
        model(tokens.to(world.device), targets.to(world.device)).item()
        for tokens, targets in validation_batches(data, BLOCK, BATCH_SIZE, 8, rank=world.rank, world_size=world.size)
    ]
    return sum(losses) / len(losses)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="what to shard (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"], help="default: %(default)s")
    parser.add_argument("--precision", choices=["bf16", "fp16"], help="default: as the model is, fp32")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
