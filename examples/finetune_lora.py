"""Train a small GPT on Python source, then adapt it to English with LoRA: the base is frozen, only adapters learn.

python examples/finetune_lora.py
torchrun --nproc-per-node 2 examples/finetune_lora.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import zerofx
from common import World, join_world
from gpt import GPT
from text import VOCAB, Batches, load_prose, load_source, validation_batches

DIM, DEPTH, HEADS, BLOCK = 96, 3, 4, 64  # BLOCK is in bytes of text
BATCH_SIZE = 16  # sequences per process and step
ADAPTER_RANK = 8


class LoRALinear(nn.Module):
    """`base(x)` plus a learned update of low rank, which starts at zero (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: GPT, rank: int) -> list[Tensor]:
    """Freeze `model`, wrap every linear layer of its blocks, and give the adapters' parameters."""
    model.requires_grad_(False)
    for module in list(model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank))
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    return [weight for adapter in adapters for weight in (adapter.down.weight, adapter.up.weight)]


def train(
    model: GPT, optimizer: torch.optim.Optimizer, data: Tensor, args: argparse.Namespace, world: World
) -> zerofx.Step:
    """Train for `args.steps` steps on `data`; gives the step, which holds the sharded parameters."""
    step = zerofx.compile(model, optimizer, stage=3, backend=args.backend)
    stream = Batches(data, BLOCK, BATCH_SIZE, rank=world.rank, world_size=world.size)
    for index in range(args.steps):
        tokens, targets = next(stream)
        loss = step(tokens.to(world.device), targets.to(world.device))
        if index % 25 == 0 or index == args.steps - 1:
            world.print(f"step {index:4d}   loss {loss.item():.3f} nats/byte")
    return step


@torch.no_grad()
def evaluate(model: GPT, data: Tensor, world: World) -> float:
    """Mean loss in nats per byte over validation batches shared out among the processes."""
    losses = [
        model(tokens.to(world.device), targets.to(world.device)).item()
        for tokens, targets in validation_batches(data, BLOCK, BATCH_SIZE, 8, rank=world.rank, world_size=world.size)
    ]
    return world.mean(sum(losses) / len(losses))


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    source, _ = load_source()
    prose, prose_validation = load_prose()

    world.print("base model, on Python source")
    model = GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK).to(world.device)
    step = train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), source, args, world)
    base_weights = step.full_state_dict()

    model = GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK).to(world.device)
    model.load_state_dict(base_weights)
    before = evaluate(model, prose_validation, world)

    adapter_weights = add_adapters(model, ADAPTER_RANK)
    model.to(world.device)
    num_learned = sum(weight.numel() for weight in adapter_weights)
    num_frozen = sum(weight.numel() for weight in model.parameters()) - num_learned
    world.print(f"\nadapters, on English: {num_learned:,} parameters learn, {num_frozen:,} are frozen")
    step = train(model, torch.optim.AdamW(adapter_weights, lr=5e-3), prose, args, world)
    with step.full_parameters():  # all processes gather the parameters together
        after = evaluate(model, prose_validation, world)
        unchanged = all(
            torch.equal(weight, base_weights[name.replace(".base.", ".")].to(weight.device))
            for name, weight in model.named_parameters()
            if not weight.requires_grad
        )
    world.print(f"\nvalidation loss on English   {before:.3f} -> {after:.3f} nats/byte")
    world.print(f"frozen weights unchanged     {unchanged}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each part (default: %(default)s)")
    parser.add_argument("--backend", default="eager", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
