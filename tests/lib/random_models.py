"""Small models that are put together at random, for promises that have to hold for any."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, ROWS = (24, 40, 64), (8, 12, 20)


class Attention(nn.Module):
    """Over the rows of a batch, as if they were tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(1, x.shape[0], 2, -1).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.out(found.transpose(1, 2).reshape(x.shape))
        return x + added


class Images(nn.Module):
    """A convolution over rows as images of one line."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.norm(self.conv(x.view(x.shape[0], 4, -1)))
        return x + added.reshape(x.shape)


class Formula(nn.Module):
    """A weight in a formula of its own."""

    def __init__(self, dim: int, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.rand(dim) + 0.5), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight)


FORMULAS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, w: x * w / (1.0 + x.pow(2).mean(-1, keepdim=True)).sqrt(),
    lambda x, w: (x - x.mean(0)) / (x.std(0) + 1e-3) * w,
    lambda x, w: x + torch.logcumsumexp(x * 0.1, 1) * w,
    lambda x, w: torch.cat([x.roll(1, 1)[:, :4], x.sort(1).values[:, 4:]], 1) * w,
    lambda x, w: x.masked_fill(x < -1.0, 0.0) * w + x.logsumexp(1, keepdim=True),
    lambda x, w: F.layer_norm(x.t().contiguous(), (x.shape[0],)).t() * w,
    lambda x, w: torch.where(x > 0.5, x, x.cumsum(0) * 0.1) * w.softmax(0),
    lambda x, w: x * w + torch.cdist(x, x)[:, :1],
    lambda x, w: F.dropout(x * w, 0.25) + x.topk(3, 1).values.sum(1, keepdim=True),
)
LAYERS: tuple[Callable[[int], nn.Module], ...] = (
    lambda dim: nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
    lambda dim: nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim, bias=False), nn.SiLU()),
    lambda dim: nn.Sequential(nn.BatchNorm1d(dim), nn.Hardtanh(), nn.Linear(dim, dim)),
    lambda dim: nn.Sequential(nn.RMSNorm(dim), nn.Softplus()),
    lambda dim: nn.utils.parametrizations.weight_norm(nn.Linear(dim, dim)),
    Attention,
    Images,
)
LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda y, x: F.mse_loss(y, torch.zeros_like(y)),
    lambda y, x: F.smooth_l1_loss(y, x, reduction="sum"),
    lambda y, x: F.soft_margin_loss(y, x.sign()),
    lambda y, x: F.binary_cross_entropy(y.sigmoid(), x.sigmoid()),
    lambda y, x: F.cross_entropy(y, x.argmax(1), label_smoothing=0.1),
    lambda y, x: F.poisson_nll_loss(y, x.abs()) + F.huber_loss(y, x),
    lambda y, x: F.kl_div(y.log_softmax(1), x.softmax(1), reduction="batchmean"),
    lambda y, x: F.cosine_embedding_loss(y, x, torch.ones(y.shape[0])),
)
OPTIMIZERS: tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, centered=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
)


@dataclass(frozen=True)
class Drawn:
    """A model with a batch, loss and optimizer."""

    model: nn.Module
    batch: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer


def draw(seed: int) -> Drawn:
    """The model of a seed: its values and its batch too."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dim, rows = rng.choice(WIDTHS), rng.choice(ROWS)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 5)):
        layers.append(rng.choice(LAYERS)(dim))
        if rng.random() < 0.5:
            layers.append(Formula(dim, rng.choice(FORMULAS)))
    model = nn.Sequential(*layers, nn.Linear(dim, dim))
    return Drawn(model, torch.randn(rows, dim), rng.choice(LOSSES), rng.choice(OPTIMIZERS)(list(model.parameters())))
