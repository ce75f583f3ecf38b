"""Contrastive training: two views of an image agree, next to views of all ranks that a collective in forward gathers.

python examples/train_contrastive.py
torchrun --nproc-per-node 2 examples/train_contrastive.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

import zerofx
from common import World, join_world
from train_convnet import BATCH_SIZE, convnet, stripes

TEMPERATURE, NOISE = 0.2, 0.2


class Contrastive(nn.Module):
    """An image's two noisy views are to agree, and no others of all processes (SimCLR, 2002.05709)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = convnet(width=8)

    def forward(self, images: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        views = [self.encoder(images + NOISE * torch.randn_like(images)) for _ in range(2)]
        left, right = (F.normalize(view, dim=-1) for view in views)
        others = right
        if dist.is_initialized():  # a node of the step, planned as zerofx's own gathers are, with a gradient
            assert dist.group.WORLD is not None
            others = collectives.all_gather_tensor_autograd(right, 0, dist.group.WORLD)
        alike = left @ others.t() / TEMPERATURE
        # The step is one program for all processes: what differs between them, as data does, is in the batch.
        own = torch.arange(len(left), device=left.device) + rank * len(left)
        return F.cross_entropy(alike, own), alike


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    model = Contrastive().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(world.rank)  # other images on every process
    step = zerofx.compile(model, optimizer, stage=3, backend=args.backend)
    rank = torch.tensor(world.rank, device=world.device)
    for index in range(args.steps):
        images, _ = stripes(BATCH_SIZE, generator)
        loss = step(images.to(world.device), rank)
        mean = world.mean(loss.item())
        if index % 20 == 0 or index == args.steps - 1:
            world.print(f"step {index:4d}   loss {mean:.3f} nats among {world.size * BATCH_SIZE} images")
    step.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    with join_world() as world:
        main(parser.parse_args(), world)
