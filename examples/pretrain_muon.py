"""Train the small GPT of train_gpt.py with Muon for its hidden matrices and AdamW for the rest, all of it sharded.

python examples/pretrain_muon.py
torchrun --nproc-per-node 2 examples/pretrain_muon.py

Muon orthogonalises whole matrices: each is updated by one process, its owner, to which the others send their slices of
it. Embeddings, the head that is tied to them, norms and biases are AdamW's, whose update is on slices as they lie.
"""

from __future__ import annotations

import argparse
import time

import torch
from tqdm import tqdm

import zerofx
from common import World, join_world
from gpt import GPT
from text import VOCAB, Batches, load_source, unigram_entropy
from train_gpt import BATCH_SIZE, BLOCK, DEPTH, DIM, HEADS, learning_rate_factor, validation_loss

MUON_RATE, ADAMW_RATE = 2e-2, 2e-3


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    train, validation = load_source()
    model = GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK).to(world.device)
    muon, adamw = optimizers = make_optimizers(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda done: learning_rate_factor(done, args.steps))
        for each in optimizers
    ]
    stream = Batches(train, BLOCK, BATCH_SIZE, rank=world.rank, world_size=world.size)
    step = zerofx.compile(model, [muon, adamw], args.stage, precision=args.precision, backend=args.backend)

    first = time.perf_counter()
    progress = tqdm(range(1, args.steps + 1), "training", unit="step", disable=world.rank != 0)
    for number in progress:
        tokens, targets = next(stream)
        loss = step(tokens.to(world.device), targets.to(world.device))  # the first call compiles the kernels
        for scheduler in schedulers:
            scheduler.step()
        if number == 1:
            world.print(f"ready after {time.perf_counter() - first:.1f} s\n\n{step}\n\n{step.schedule()}\n")
        if number % 10 == 0 or number == args.steps:  # reading a loss waits for the device, so not at every step
            progress.set_postfix(loss=f"{loss.item():.3f}")

    nats = world.mean(validation_loss(step, validation, world))
    world.print(f"validation loss   {nats:.3f} nats/byte")
    world.print(f"unigram entropy   {unigram_entropy(validation):.3f} nats/byte (a model that ignores the context)")
    world.print(f"predicted peak    {step.plan.peak_bytes['device'] / 2**20:.2f} MiB on each device")
    world.print(f"generated step    {step.source_path}")


def make_optimizers(model: GPT) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    """Muon over the matrices of the layers, and AdamW over everything else; each parameter is of one of them."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return (
        torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.1),
    )


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
