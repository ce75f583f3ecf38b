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


class Masked(nn.Module):
    """As transformers are that take a mask, or do without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        outputs: Tensor = self.layer(x if mask is None else x * mask) * scale
        return outputs


def _distance(outputs: Tensor, x: Tensor, *, targets: Tensor, **_: Any) -> Tensor:
    return (outputs - targets).square().mean()


def test_targets_do_not_take_the_place_of_an_argument_that_the_model_does_without() -> None:
    model = Masked()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), loss_fn=lambda y, x, t: y.sum(), backend="eager")
    with pytest.raises(zerofx.UsageError, match=r"2 by position and a Masked.forward that needs 1 and also takes mask"):
        step(torch.randn(6, 8), torch.randn(6, 8))


@pytest.mark.parametrize("is_masked", [False, True])
def test_arguments_go_to_model_and_loss_by_name(is_masked: bool) -> None:
    model = Masked()
    x, mask, targets = torch.randn(6, 8), torch.rand(6, 8).round(), torch.randn(6, 4)
    given = {"mask": mask} if is_masked else {}
    expected = (model(x, **given) - targets).square().mean()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), loss_fn=_distance, backend="eager")
    assert torch.equal(step(x, targets=targets, **given), expected)
