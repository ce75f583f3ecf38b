"""Train a convolutional network with batch norm to tell the direction of noisy stripes, on images made on the fly.

python examples/train_convnet.py
torchrun --nproc-per-node 2 examples/train_convnet.py
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import zerofx
from common import World, join_world

NUM_CLASSES, SIZE = 8, 24  # directions of the stripes; image height and width in pixels
BATCH_SIZE = 64  # images per process and step


def convnet(width: int) -> nn.Sequential:
    """Images [batch, 1, SIZE, SIZE] to logits [batch, NUM_CLASSES]."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *stage(1, width),
        *stage(width, 2 * width),
        *stage(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, NUM_CLASSES),
    )


def stripes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` images [count, 1, SIZE, SIZE] of stripes under as much noise, and their directions, int64 [count]."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    angle = (labels * math.pi / NUM_CLASSES)[:, None, None]
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images = torch.sin(0.8 * (x * angle.cos() + y * angle.sin()) + phase)
    noise = torch.randn(images.shape, generator=generator)
    return (images + noise)[:, None], labels


@torch.no_grad()
def accuracy(model: nn.Module, world: World) -> float:
    """Fraction of new images whose direction the model finds, over all processes."""
    images, labels = stripes(512, torch.Generator().manual_seed(1_000_000 + world.rank))
    right = model(images.to(world.device)).argmax(1) == labels.to(world.device)
    return world.mean(right.float().mean().item())


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    model = convnet(width=16).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(world.rank)  # other images on every process

    # The model takes the images; the loss takes what the model gives, and what the model does not take.
    step = zerofx.compile(model, optimizer, stage=3, loss_fn=nn.CrossEntropyLoss(), backend=args.backend)
    for index in range(args.steps):
        images, labels = stripes(BATCH_SIZE, generator)
        loss = step(images.to(world.device), labels.to(world.device))
        if index % 20 == 0 or index == args.steps - 1:
            world.print(f"step {index:4d}   loss {loss.item():.3f} nats")

    with step.full_parameters():  # all processes gather the parameters together
        model.eval()
        share_correct = accuracy(model, world)
    world.print(f"accuracy on new images   {share_correct:.1%} (guessing: {1 / NUM_CLASSES:.1%})")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--backend", default="eager", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
