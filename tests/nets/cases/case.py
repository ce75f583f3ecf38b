"""What a case of the net over models is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class ModelCase:
    """``library`` is the module it is imported from, ``""`` for a script in plain torch; ``build`` gives model and
    batches. ``constant`` names what of a batch is the same in every step."""

    name: str
    library: str
    build: Callable[[], tuple[nn.Module, Callable[[], Batch]]]
    constant: tuple[str, ...] = ()


class Loss(nn.Module):
    """``model`` with what a training script computes of it: ``compute(model, *batch)`` is the loss."""

    def __init__(self, model: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, *batch: Any) -> Tensor:
        return self.compute(self.model, *batch)


def squared(model: nn.Module, *batch: Any) -> Tensor:
    """The mean square of what the model gives first."""
    found: Any = model(*batch)
    while not isinstance(found, Tensor):
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return found.float().square().mean()
