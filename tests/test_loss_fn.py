"""Losses that are modules, with tensors of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx

# Importing Inductor makes torch warn of what it deprecates itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)


class Weighted(nn.Module):
    """Cross entropy with a weight for each class, kept in a buffer, and classes that do not count."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(torch.tensor([0.1, 0.5, 1.0, 2.0]), ignore_index=3, reduction=reduction)

    def forward(self, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(outputs, y).mean()
        return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_loss_with_weights_for_classes_trains_as_in_eager_mode(backend: Any, reduction: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), Weighted(reduction)
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), foreach=False) for m in (model, plain))
    x, y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 1, 0])
    step = zerofx.compile(model, optimizer, loss_fn=loss_fn, backend=backend)
    for _ in range(3):
        expected = loss_fn(plain(x), x, y)
        expected.backward()
        other.step()
        other.zero_grad()
        found = step(x, y)
        assert torch.equal(found, expected) if backend == "eager" else torch.allclose(found, expected, rtol=1e-5)
