"""Whole training scripts in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.case import Batch, Loss, ModelCase


class _Dpo(nn.Module):
    """Direct preference optimization (2305.18290) without a reference model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    def likelihood(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).sum((1, 2))
        return found

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(self.likelihood(chosen) - self.likelihood(rejected)).mean()


class _Vae(nn.Module):
    """A variational autoencoder (1312.6114) with noise drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        loss: Tensor = F.mse_loss(self.decoder(drawn), x) + divergence
        return loss


def _pinn(net: nn.Module, x: Tensor) -> Tensor:
    """The residual of ``u'' = -u`` by ``torch.func``: second derivatives inside the loss."""

    def u(point: Tensor) -> Tensor:
        return net(point[None])[0].sum()  # type: ignore[no-any-return]

    second = torch.func.vmap(torch.func.grad(lambda p: torch.func.grad(u)(p).sum()))(x)
    loss: Tensor = (second + torch.func.vmap(u)(x)[:, None]).square().mean()
    return loss


def _flow_matching(net: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Conditional flow matching (2210.02747)."""
    here = (1 - time) * noise + time * x
    loss: Tensor = F.mse_loss(net(torch.cat([here, time], -1)), x - noise)
    return loss


def _contrastive(net: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """InfoNCE (1807.03748) within the batch of a rank."""
    a, b = F.normalize(net(first), dim=-1), F.normalize(net(second), dim=-1)
    loss: Tensor = F.cross_entropy(a @ b.T / 0.1, torch.arange(a.shape[0]))
    return loss


def _mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, outside))


def _script(name: str, build: Callable[[], nn.Module], draw: Callable[[], Batch]) -> ModelCase:
    return ModelCase(f"script {name}", "", lambda: (build(), draw))


SCRIPTS = (
    _script("DPO", _Dpo, lambda: (torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6)))),
    _script("VAE", _Vae, lambda: (torch.randn(4, 8),)),
    _script("PINN", lambda: Loss(_mlp(1, 1), _pinn), lambda: (torch.randn(8, 1),)),
    _script(
        "flow matching",
        lambda: Loss(_mlp(5, 4), _flow_matching),
        lambda: (torch.randn(8, 4), torch.randn(8, 4), torch.rand(8, 1)),
    ),
    _script("contrastive", lambda: Loss(_mlp(4, 4), _contrastive), lambda: (torch.randn(8, 4), torch.randn(8, 4))),
)
