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


@pytest.mark.days(3)
@pytest.mark.sweep(2)
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


def _run(model: nn.Module, loss_fn: Any, *args: Any, **kwargs: Any) -> Tensor:
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn, backend="eager")
    found: Tensor = step(*args, **kwargs)
    step.close()
    return found


@pytest.mark.parametrize("is_masked", [False, True])
def test_arguments_go_to_model_and_loss_by_name(is_masked: bool) -> None:
    model = Masked()
    x, mask, targets = torch.randn(6, 8), torch.rand(6, 8).round(), torch.randn(6, 4)
    given = {"mask": mask} if is_masked else {}
    expected = (model(x, **given) - targets).square().mean()
    assert torch.equal(_run(model, _distance, x, targets=targets, **given), expected)


class Open(Masked):
    """Takes names that it does not know."""

    def forward(self, x: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask)


class Handing(nn.Module):
    """Hands on what it gets, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _late(outputs: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * (outputs - target).square().mean()


@pytest.mark.parametrize("kind", [Masked, Open, Handing])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(),
        nn.functional.mse_loss,
        _late,
        lambda outputs, x, y: (outputs - y).square().mean(),
        lambda *outputs_and_rest: nn.functional.mse_loss(*outputs_and_rest),
    ],
)
def test_a_loss_gets_what_the_model_does_not_take(kind: type[nn.Module], loss_fn: Any) -> None:
    model, x, y = kind(), torch.randn(6, 8), torch.randn(6, 4)
    expected = (model(x) - y).square().mean()
    assert torch.equal(_run(model, loss_fn, x, y), expected)


def test_a_name_that_forward_does_not_have_is_for_the_loss_alone() -> None:
    model, x, y = Open(), torch.randn(6, 8), torch.randn(6, 4)
    expected = (model(x) - y).square().mean()
    assert torch.equal(_run(model, nn.MSELoss(), x, target=y), expected)


def test_a_loss_that_can_be_called_with_nothing_there_is_told_who_gets_what() -> None:
    model, x, y = Masked(), torch.randn(6, 8), torch.randn(6, 4)
    with pytest.raises(zerofx.UsageError, match=r"loss_fn\(outputs, Tensor\[6, 8\], Tensor\[6, 4\]\).*too many pos"):
        _run(model, nn.MSELoss(), x, x, y)
    with pytest.raises(zerofx.UsageError, match=r"<lambda>\(o, a, b, c\): missing a required argument"):
        _run(model, lambda o, a, b, c: o.sum(), x, y)
    with pytest.raises(zerofx.UsageError, match="who gets target, which loss_fn names, and which Handing"):
        _run(Handing(), nn.MSELoss(), x, target=y)
    with pytest.raises(zerofx.UsageError, match=r"found a class: give MSELoss\(\)"):
        _run(model, nn.MSELoss, x, y)


def test_a_model_that_cannot_be_called_with_the_batch_is_a_wrong_call() -> None:
    x = torch.randn(6, 8)
    with pytest.raises(zerofx.UsageError, match=r"Linear.forward\(input\).*found Linear\(Tensor\[6, 8\], Tensor"):
        _run(nn.Linear(8, 1), None, x, x)


def test_a_loss_that_torch_refuses_is_named_with_its_arguments() -> None:
    model = nn.Linear(8, 4)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(zerofx.CaptureError, match=r"(?s)refuses an operation.*in loss_fn\(outputs, Tensor\[2, 8\]\)"):
        step(torch.randn(2, 8))
    step.close()
