"""Train a small GPT on the source of Python's standard library, its parameters, gradients and optimizer sharded.

python examples/train_gpt.py
torchrun --nproc-per-node 2 examples/train_gpt.py
torchrun --nproc-per-node 2 examples/train_gpt.py --resume runs/gpt

With --resume it saves to that folder as it goes, also where it is stopped (Ctrl-C, SIGTERM), and goes on from what is
there, with as many processes or not; --global-batch has them train on as many sequences a step.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import zerofx
from common import World, join_world
from gpt import GPT, generate
from logs import Log
from text import VOCAB, Batches, decode, encode, load_source, unigram_entropy, validation_batches

DIM, DEPTH, HEADS, BLOCK = 128, 4, 4, 128  # BLOCK is in bytes of text
BATCH_SIZE = 16  # sequences per process and step
LEARNING_RATE, WARMUP_STEPS = 2e-3, 30


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    train, validation = load_source()
    model = GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate_factor(done, args.steps))
    num_micro_batches = micro_batches(args.global_batch, world.size)
    batch_size = BATCH_SIZE * num_micro_batches
    stream = Batches(train, BLOCK, batch_size, rank=world.rank, world_size=world.size)

    def next_batch() -> tuple[Tensor, Tensor]:
        tokens, targets = next(stream)
        return tokens.to(world.device), targets.to(world.device)

    world.print(f"compiling stage {args.stage} for {world.size} process(es), backend {args.backend} ...")
    step = zerofx.compile(
        model, optimizer, stage=args.stage, precision=args.precision, backend=args.backend, accumulate=num_micro_batches
    )
    state = {"scheduler": scheduler, "data": stream}
    run = zerofx.Run(step, args.resume, every=args.every, keep=args.keep, state=state) if args.resume else None
    log = Log(args.resume, rank=world.rank, resumed_from=run.resumed_from if run is not None else None)
    if run is not None and run.resumed_from is not None:
        world.print(f"going on from {run.resumed_from}")

    first = time.perf_counter()
    numbers = run.steps(args.steps) if run is not None else iter(range(1, args.steps + 1))
    progress = tqdm(numbers, "training", args.steps, initial=step.num_steps, unit="step", disable=world.rank != 0)
    batch = None
    for num_timed, number in enumerate(progress):
        step(*(batch := next_batch()))  # the first call compiles the kernels
        scheduler.step()
        if num_timed == 0:
            world.print(f"ready after {time.perf_counter() - first:.1f} s\n\n{step}\n\n{step.schedule()}\n")
        if number % 10 == 0 or number == args.steps:  # reading numbers waits for the device, so not at every step
            metrics = step.metrics
            progress.set_postfix(loss=f"{metrics['loss']:.3f}", tokens_per_s=f"{metrics['tokens_per_second']:,.0f}")
            log.write({**metrics, "learning_rate": float(scheduler.get_last_lr()[0])})
    log.close()
    if batch is None or (run is not None and run.stopped):
        world.print("stopped and saved" if batch is not None else "nothing left to do")
        return

    nats = world.mean(validation_loss(step, validation, world))
    with step.full_parameters():  # all processes gather the parameters together
        model.eval()
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


def micro_batches(global_batch: int | None, num_processes: int) -> int:
    """How many micro-batches a process has, for so many sequences a step in all."""
    if global_batch is None:
        return 1
    if global_batch % (BATCH_SIZE * num_processes):
        raise SystemExit(
            f"--global-batch has to be a multiple of {BATCH_SIZE} sequences for {num_processes} process(es)"
        )
    return global_batch // (BATCH_SIZE * num_processes)


def learning_rate_factor(done: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth, as a factor of the learning rate after `done` of `steps` steps."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(done / max(steps, 1), 1.0))
    return min((done + 1) / WARMUP_STEPS, 0.1 + 0.9 * cosine)


def validation_loss(step: zerofx.Step, data: Tensor, world: World) -> float:
    """Mean loss in nats per byte over this process's share of the validation batches."""
    losses = [
        step.evaluate(tokens.to(world.device), targets.to(world.device)).item()
        for tokens, targets in validation_batches(data, BLOCK, BATCH_SIZE, 8, rank=world.rank, world_size=world.size)
    ]
    return sum(losses) / len(losses)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="what to shard (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"], help="default: %(default)s")
    parser.add_argument("--precision", choices=["bf16", "fp16"], help="default: as the model is, fp32")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="save to it, and go on from what is there")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints stay (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, help=f"sequences a step (default: {BATCH_SIZE} for each process)")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
