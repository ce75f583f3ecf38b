"""Train a model parts of which are frozen, and thawed, between steps, with zerofx and in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zerofx
from gpt import GPT
from tests.lib.runs.adversarial import average_gradients
from tests.lib.runs.training import world

# What is frozen before the steps with these numbers: a layer, a part of one, what is outside of layers.
FROZEN = {0: (), 2: ("layers.0.", "layers.1.norm1", "head."), 4: ("layers.0.",), 5: ()}
STEPS = 7


def trained_while_freezing(kind: str, stage: int | None, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Losses, and all values and states after the last step; `stage` is None for eager mode."""
    torch.manual_seed(0)
    model = GPT(19, 16, 2, 2, 8)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    step = None if stage is None else zerofx.compile(model, optimizer, stage, backend="eager", **options)
    draw = torch.Generator().manual_seed(world()[0])
    losses = []
    for number in range(STEPS):
        if number in FROZEN:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(FROZEN[number] or ("nothing",)))
        batch = torch.randint(19, (2, 8), generator=draw), torch.randint(19, (2, 8), generator=draw)
        if step is not None:
            losses.append(step(*batch).clone())
            continue
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.detach())
    values = model.state_dict() if step is None else step.full_state_dict()
    states = {
        f"{name} of {number}": value
        for number, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    everything = {**{name: tensor.clone() for name, tensor in values.items()}, **states}
    if step is not None:
        step.close()
    return losses, everything


def unlike_eager_mode(kind: str, stage: int, **options: Any) -> list[str]:
    """What is not as in eager mode, in words."""
    losses, everything = trained_while_freezing(kind, None)
    found, ours = trained_while_freezing(kind, stage, **options)
    wrong = [f"loss {i} is {b}, not {a}" for i, (a, b) in enumerate(zip(losses, found, strict=True)) if a != b]
    wrong += [f"{name} is there, or not" for name in everything.keys() ^ ours.keys()]
    both = everything.keys() & ours.keys()
    return wrong + [f"{name} is another" for name in both if not _same(everything[name], ours[name])]


def _same(first: Any, other: Any) -> bool:
    return torch.equal(torch.as_tensor(first), torch.as_tensor(other))
