"""What a user has in hands: a tiny model, its batches, and how to tell that zerofx has left both alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 11
DIM = 4


class Tiny(nn.Module):
    """An embedding, two equal layers and a head; the loss is a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(DIM, TOKENS)

    def outputs(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.outputs(ids)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tiny() -> Tiny:
    """The same values every time."""
    torch.manual_seed(3)
    return Tiny()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """One tensor at a time, whose bits the step must reproduce."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def ids(seed: int = 0, rows: int = 2, length: int = 3) -> Tensor:
    """Token ids [rows, length]."""
    return torch.randint(TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Tensor:
    """One step of plain training; returns the loss."""
    optimizer.zero_grad()
    loss: Tensor = model(*args, **kwargs)
    loss.backward()
    optimizer.step()
    return loss.detach()


def facts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All that zerofx could have touched."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("hooks") and value}
        found[f"{path}: attributes"] = sorted(vars(module)), hooks, module.training
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = not tensor.is_meta and type(tensor.data) is Tensor
        values = tensor.detach().reshape(-1).tolist() if plain else None
        address = tensor.data_ptr() if plain else 0
        found[name] = id(tensor), address, tensor.dtype, tensor.requires_grad, tensor.grad, str(values)
    if optimizer is not None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        members = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        hooks = {key: list(value) for key, value in vars(optimizer).items() if key.startswith("_optimizer_") and value}
        found["optimizer"] = sorted(vars(optimizer)), hooks, str(groups), members, str(dict(optimizer.state))
    return found


@contextlib.contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """What happens inside leaves the model and the optimizer as they were."""
    before, mode = facts(model, optimizer), torch.is_grad_enabled()
    yield
    after = facts(model, optimizer)
    assert {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)} == {}
    assert torch.is_grad_enabled() == mode


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())
