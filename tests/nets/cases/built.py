"""What cases of models have in common, and models that take more to build than a constructor's arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.case import Batch, Loss, squared


def _get(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def of(path: str, sizes: tuple[int, ...] | Callable[[], Batch], compute: Callable[..., Tensor] = squared,
        **options: Any) -> Callable[[], tuple[nn.Module, Callable[[], Batch]]]:  # fmt: skip
    """A case whose model is called ``path``, made with ``options``, for tensors of ``sizes``."""

    def build() -> tuple[nn.Module, Callable[[], Batch]]:
        draw = sizes if callable(sizes) else lambda: (torch.randn(sizes),)
        return Loss(_get(path)(**options), compute), draw

    return build


def tokens() -> Batch:
    return (torch.randint(0, 32, (2, 8)),)


_GRAPH = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


def graph() -> Batch:
    return torch.randn(6, 8), _GRAPH


def diffusion_loss(model: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    noisy = x * (1 - time / 10).view(-1, 1, 1, 1) + noise * (time / 10).view(-1, 1, 1, 1)
    return F.mse_loss(model(noisy, time).sample, noise)


def images() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.randint(0, 10, (2,))


def _likelihood(model: nn.Module, x: Tensor) -> Tensor:
    return -model.log_prob(x).mean()  # type: ignore[operator, no-any-return]  # a method of flows


def nflow() -> tuple[nn.Module, Callable[[], Batch]]:
    transforms = importlib.import_module("nflows.transforms")
    base = _get("nflows.distributions.StandardNormal")([4])
    layers = [transforms.MaskedAffineAutoregressiveTransform(4, 8), transforms.ReversePermutation(4)]
    return Loss(_get("nflows.flows.Flow")(transforms.CompositeTransform(layers), base), _likelihood), _points


def normflow() -> tuple[nn.Module, Callable[[], Batch]]:
    flows = importlib.import_module("normflows")
    layers = [flows.flows.AffineCouplingBlock(flows.nets.MLP([2, 8, 4], init_zeros=True)), flows.flows.Permute(4)]
    model = flows.NormalizingFlow(flows.distributions.DiagGaussian(4, trainable=False), layers)
    return Loss(model, lambda flow, x: flow.forward_kld(x)), _points


def _points() -> Batch:
    return (torch.randn(8, 4),)


def ode() -> tuple[nn.Module, Callable[[], Batch]]:
    solve = _get("torchdiffeq.odeint")

    def compute(net: nn.Module, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3)
        return solve(lambda _, y: net(y), x, times, method="rk4")[-1].square().mean()  # type: ignore[no-any-return]

    return Loss(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), compute), _points


def tab() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("tab_transformer_pytorch.TabTransformer")(
        categories=(4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2
    )
    return Loss(model, squared), lambda: (torch.randint(0, 3, (4, 2)), torch.randn(4, 4))


def ft() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("tab_transformer_pytorch.FTTransformer")(
        categories=(4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2
    )
    return Loss(model, squared), lambda: (torch.randint(0, 3, (4, 2)), torch.randn(4, 4))


def litgpt() -> tuple[nn.Module, Callable[[], Batch]]:
    config = _get("litgpt.config.Config")(
        block_size=8, n_layer=2, n_embd=16, n_head=2, padded_vocab_size=32, intermediate_size=32
    )
    return Loss(_get("litgpt.model.GPT")(config), squared), tokens


def hyper_connected() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("hyper_connections.HyperConnections")(num_residual_streams=4, dim=8, branch=nn.Linear(8, 8))
    return Loss(model, squared), lambda: (torch.randn(4, 8, 8),)
