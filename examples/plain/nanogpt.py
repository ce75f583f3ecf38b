"""Train a GPT on Python's own source with nanoGPT's loop: micro-batches, warm-up and decay, clipping, evaluation."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from common import World, join_world
from gpt import GPT
from text import VOCAB, load_source

BLOCK, BATCH_SIZE, ACCUMULATION = 64, 8, 4  # bytes of text; sequences of a micro-batch; micro-batches of a step
LEARNING_RATE, WARM_UP, GRAD_CLIP, WEIGHT_DECAY = 2e-3, 10, 1.0, 0.1
EVAL_INTERVAL, EVAL_ITERS = 25, 4


def get_lr(iteration: int, steps: int) -> float:
    if iteration < WARM_UP:
        return LEARNING_RATE * (iteration + 1) / (WARM_UP + 1)
    ratio = (iteration - WARM_UP) / max(steps - WARM_UP, 1)
    return LEARNING_RATE * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * ratio)))


def main(args: argparse.Namespace, world: World) -> None:
    data = dict(zip(("train", "val"), load_source(), strict=True))
    torch.manual_seed(1337 + world.rank)

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data[split]) - BLOCK, (BATCH_SIZE,))
        x = torch.stack([data[split][i : i + BLOCK] for i in starts]).long()
        y = torch.stack([data[split][i + 1 : i + 1 + BLOCK] for i in starts]).long()
        return x.to(world.device), y.to(world.device)

    model = GPT(VOCAB, dim=96, depth=3, heads=4, block=BLOCK).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    net = DDP(model) if world.size > 1 else model

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        model.eval()
        for split in data:
            losses = torch.zeros(EVAL_ITERS)
            for k in range(EVAL_ITERS):
                x, y = get_batch(split)
                losses[k] = net(x, y).item()
            out[split] = losses.mean().item()
        model.train()
        return out

    for iteration in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration, args.steps)
        if iteration and iteration % EVAL_INTERVAL == 0:
            losses = estimate_loss()
            world.print(f"step {iteration}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        for _ in range(ACCUMULATION):
            x, y = get_batch("train")
            loss = net(x, y)
            (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % 10 == 0:
            world.print(f"iter {iteration}: loss {loss.item():.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
