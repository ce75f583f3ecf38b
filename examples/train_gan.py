"""Train a GAN on points around a ring, each of its two models by a step that reads the other where that step has it.

python examples/train_gan.py
torchrun --nproc-per-node 2 examples/train_gan.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from common import World, join_world

NOISE_DIM, WIDTH, DEPTH = 8, 128, 3
BATCH_SIZE = 128  # points per process and step
NUM_SPOTS, RADIUS, SPREAD = 8, 2.0, 0.1


def points(num: int, generator: torch.Generator) -> Tensor:
    """Samples of the data, shape [num, 2]: spots on a ring."""
    angle = 2 * math.pi / NUM_SPOTS * torch.randint(NUM_SPOTS, (num,), generator=generator)
    centers = RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)
    return centers + SPREAD * torch.randn(num, 2, generator=generator)


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), *hidden, nn.Linear(WIDTH, outputs))


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    generator = network(NOISE_DIM, 2).to(world.device)
    discriminator = network(2, 1).to(world.device)
    draw = torch.Generator().manual_seed(1 + world.rank)  # other points on every process

    # Parameters of the other model get no gradient, and are gathered for their use only. No copy is made of either.
    def realism(model: nn.Module, noise: Tensor) -> Tensor:
        return F.softplus(-discriminator(model(noise))).mean()

    def doubt(model: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            fakes = generator(noise)
        return F.softplus(-model(real)).mean() + F.softplus(model(fakes)).mean()

    def compiled(model: nn.Module, forward: Callable[..., Tensor]) -> zerofx.Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return zerofx.compile(model, optimizer, stage=3, forward=forward, backend=args.backend)

    generator_step, discriminator_step = compiled(generator, realism), compiled(discriminator, doubt)
    for index in range(args.steps):
        real = points(BATCH_SIZE, draw).to(world.device)
        noise = torch.randn(BATCH_SIZE, NOISE_DIM, generator=draw).to(world.device)
        caught, fooled = discriminator_step(real, noise), generator_step(noise)
        if index % 200 == 0 or index == args.steps - 1:
            world.print(f"step {index:4d}   nats: discriminator {caught.item():.3f}   generator {fooled.item():.3f}")

    with generator_step.full_parameters(), torch.no_grad():
        fakes = generator(torch.randn(1000, NOISE_DIM, generator=draw).to(world.device)).cpu()
    spot = (torch.atan2(fakes[:, 1], fakes[:, 0]) / (2 * math.pi / NUM_SPOTS)).round().remainder(NUM_SPOTS)
    on_ring = (fakes.norm(dim=1) - RADIUS).abs() < 4 * SPREAD
    world.print(f"points on the ring   {world.mean(on_ring.float().mean().item()):.2f}")
    world.print(f"spots reached        {spot[on_ring].unique().numel()} of {NUM_SPOTS}")
    discriminator_step.close()
    generator_step.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    with join_world() as world:
        main(parser.parse_args(), world)
