"""Models that differ in what they are called with, and in where what they return has the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.lib.models.parameters import Stack


class ManyArguments(Stack):
    """Positional and keyword arguments, nested containers, and leaves that are no tensors."""

    def forward(  # type: ignore[override]  # a batch of another form
        self, x: Tensor, parts: list[Any], *, target: dict[str, Any], repeat: int, mode: str, mask: Tensor | None = None
    ) -> Tensor:
        for _ in range(repeat):
            x = self.predict(x)
        if mode == "shift":
            x = x + parts[0] * parts[1]["scale"]
        if mask is not None:
            x = x * mask
        flag, values = target["pair"]
        return F.mse_loss(x, values) if flag else x.sum()


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Returning(Stack):
    """Returns its loss in a container."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(1)
        self.wrap = wrap

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.predict(x)
        return self.wrap(F.mse_loss(logits, y), logits)


class Predicting(Stack):
    """Returns predictions only; the loss is a function of them and the batch."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a batch of another form
        return self.predict(x)


class FlatLoss(Stack):
    """Its loss is a view of a prediction."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.predict(x)[:1, :1].view(())
