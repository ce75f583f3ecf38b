"""Train a small network on noisy images to agree with a teacher that follows it, with `forward=`.

python examples/distill.py
torchrun --nproc-per-node 2 examples/distill.py
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from common import World, join_world
from train_convnet import BATCH_SIZE, convnet, stripes

TEMPERATURE, NOISE, MOMENTUM = 2.0, 0.2, 0.95


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    model = convnet(width=8).to(world.device)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(world.rank)  # other images on every process

    # Whatever a step computes before it goes backward. The teacher's values are those that it has at each step.
    def forward(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(images + NOISE * torch.randn_like(images))
        target = (teacher(images) / TEMPERATURE).softmax(-1)
        agreement = F.kl_div((logits / TEMPERATURE).log_softmax(-1), target, reduction="batchmean")
        return F.cross_entropy(logits, labels) + agreement, {"logits": logits, "agreement": agreement}

    step = zerofx.compile(model, optimizer, stage=3, forward=forward, backend=args.backend)
    for index in range(args.steps):
        images, labels = stripes(BATCH_SIZE, generator)
        loss, extras = step(images.to(world.device), labels.to(world.device))
        with step.full_parameters(), torch.no_grad():  # every process has all of the teacher
            for own, other in zip(teacher.state_dict().values(), model.state_dict().values(), strict=True):
                own.copy_(torch.lerp(other, own, MOMENTUM) if own.is_floating_point() else other)
        if index % 20 == 0 or index == args.steps - 1:
            right = (extras["logits"].argmax(1).cpu() == labels).float().mean().item()
            world.print(
                f"step {index:4d}   loss {loss.item():.3f} nats, {extras['agreement'].item():.3f} of them from the "
                f"teacher   accuracy {right:.2f}"
            )
    step.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    with join_world() as world:
        main(parser.parse_args(), world)
