"""Optimizers that keep more than flat states go on from a checkpoint as if nothing had been."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx


class _Norm(enum.IntEnum):
    SIGN = 0
    FROBENIUS = 1


class _Ours(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                self.update(p, p.grad, group, self.state[p])

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class CountsInAttribute(_Ours):
    """Its own ``state_dict`` has the count."""

    total = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total += 1
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] / self.total)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"total": self.total}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.total = state_dict["total"]


class WithEnumerations(_Ours):
    """One in its groups, and one in the states of whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["norm"] = _Norm.FROBENIUS

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert isinstance(group["norm"], _Norm)
        norm = state.setdefault("norm", group["norm"])
        assert isinstance(norm, _Norm)
        p.sub_(grad / grad.norm(), alpha=group["lr"])


class WithOneElement(_Ours):
    """A number in a tensor of shape [1]."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["weight"] = torch.zeros(1, device=p.device)
            state["mean"] = torch.zeros_like(p)
        state["weight"].mul_(0.9).add_(1.0)
        state["mean"].lerp_(grad, weight=state["weight"].reciprocal().reshape(()))
        p.sub_(state["mean"], alpha=group["lr"])


class WithColumns(_Ours):
    """Eigenvectors, which lie column by column: products with them round otherwise than by rows."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if p.dim() < 2:
            return
        if not state:
            state["basis"] = torch.linalg.eigh(grad @ grad.T)[1]
        p.sub_(state["basis"] @ (state["basis"].T @ grad), alpha=group["lr"])


class WholeAtFirst(_Ours):
    """Only the first step needs the whole parameter."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["scale"] = 1.0 / (1.0 + grad.norm())
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(grad, weight=0.1)
        p.sub_(state["momentum"] * state["scale"], alpha=group["lr"])


def _train(kind: type[_Ours], batches: list[Tensor], *, load: Path | None = None, save: Path | None = None) -> Any:
    """Losses, parameters, and the optimizer's own state after some steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 33))
    optimizer = kind(model.parameters())
    step = zerofx.compile(model, optimizer, 3, loss_fn=lambda outputs, _: outputs.square().sum(), backend="eager")
    if load is not None:
        step.load_checkpoint(load)
    losses = [step(batch).item() for batch in batches]
    if save is not None:
        step.save_checkpoint(save)
    left = optimizer.state_dict()
    step.close()
    return losses, model.state_dict(), left


@pytest.mark.parametrize("kind", [CountsInAttribute, WithEnumerations, WithOneElement, WithColumns, WholeAtFirst])
def test_a_resumed_optimizer_goes_on_to_the_bit(kind: type[_Ours], tmp_path: Path) -> None:
    batches = list(torch.randn(5, 8, 33, generator=torch.Generator().manual_seed(2)))
    losses, parameters, left = _train(kind, batches)
    first, *_ = _train(kind, batches[:2], save=tmp_path / "saved")
    rest, resumed, left_resumed = _train(kind, batches[2:], load=tmp_path / "saved")
    assert losses == first + rest
    assert all(torch.equal(value, resumed[name]) for name, value in parameters.items())
    assert left.keys() == left_resumed.keys()
    assert [*left["state"]] == [*left_resumed["state"]]
    for key, entry in left["state"].items():
        for name, value in entry.items():
            found = left_resumed["state"][key][name]
            assert type(value) is type(found)
            if isinstance(value, Tensor):
                assert value.stride() == found.stride() and torch.equal(value, found)
