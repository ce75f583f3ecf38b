"""Train an image classifier with the loop of timm's script: smoothed labels, cosine schedule, clipping, validation."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zerofx
from common import World, join_world
from train_convnet import NUM_CLASSES, convnet, stripes

BATCH_SIZE, CLIP_GRAD = 32, 1.0


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], world: World) -> float:
    model.eval()
    correct = total = 0
    for images, target in loader:
        output = model(images.to(world.device))
        correct += int((output.argmax(1) == target.to(world.device)).sum())
        total += len(target)
    model.train()
    return 100.0 * correct / total


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(42)
    draws = torch.Generator().manual_seed(0)
    train, test = TensorDataset(*stripes(2048, draws)), TensorDataset(*stripes(512, draws))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train, world.size, world.rank)
    loader_train = DataLoader(train, BATCH_SIZE, sampler=sampler, drop_last=True)
    loader_eval = DataLoader(test, BATCH_SIZE)
    model = convnet(width=16).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader_train))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    step = zerofx.compile(model, optimizer, loss_fn=loss_fn, max_grad_norm=CLIP_GRAD)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch_idx, (images, target) in enumerate(loader_train):
            images, target = images.to(world.device), target.to(world.device)
            loss = step(images, target)
            optimizer.zero_grad()
            scheduler.step()
            if batch_idx % 10 == 0:
                world.print(f"train: {epoch} [{batch_idx:>3d}/{len(loader_train)}] loss: {loss.item():.4f}")
        with step.full_parameters():
            top1 = validate(model, loader_eval, world)
        world.print(f"epoch {epoch}: acc@1 {top1:.2f} of {NUM_CLASSES} classes")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
