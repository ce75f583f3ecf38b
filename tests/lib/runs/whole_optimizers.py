"""Optimizers that need whole parameters or combine them, and models that they train."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Matrices(nn.Module):
    """Weights of uneven sizes, all of them matrices: none is a multiple of anything that buckets are padded to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in ((6, 11), (11, 7), (7, 13), (13, 5)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + x.sum()


class Mixed(nn.Module):
    """Matrices, biases, a scalar, a batch of matrices, and a parameter that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 5) / 3)
        self.transposed = nn.Parameter(torch.randn(5, 6).t() / 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x) * self.scale))
        x = torch.einsum("bi,eij->bj", x, self.experts) + x @ self.transposed
        return F.softplus(x).mean() + x.square().sum()


class WithEmpty(Mixed):
    """The same and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


class Uneven(nn.Module):
    """Parameters of as many elements as states in few bits begin with, one fewer and one more, and of uneven blocks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(4095,), (64, 64), (17, 241), (17, 256), (4400,), (3,)]
        self.weights = nn.ParameterList(torch.randn(shape) / 3 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        total, mean = x.new_zeros(()), x.mean()
        for number, weight in enumerate(self.weights):
            wave = torch.arange(weight.numel(), dtype=x.dtype).mul(0.37 + number).sin().view(weight.shape)
            total = total + (weight * wave + mean).square().mean() * 10
        return total


class ByNorms(torch.optim.Optimizer):
    """A step as long as a parameter's own norm says: it treats each parameter by itself, and needs all of it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                if not state:
                    state["means"] = [torch.zeros_like(p), torch.zeros(p.shape[:1])]
                    state["number"] = 0
                state["number"] += 1
                mean, rows = state["means"]
                mean.lerp_(p.grad, 0.3)
                rows.lerp_(p.grad.square().reshape(*p.shape[:1], -1).mean(-1) if p.dim() else p.grad.square(), 0.2)
                size = rows.sum().sqrt() + 1e-3
                p.add_(mean / size, alpha=-group["lr"] * float(p.norm().clamp(min=0.1)))


class ByAllNorms(torch.optim.Optimizer):
    """A step of the length that the norm of all gradients gives it, and no longer than the longest so far: what it
    knows of all parameters is a state of the optimizer itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        every = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.zeros(())
        for _, p in every:
            total.add_(p.grad.norm() ** 2)
        known = self.state["of all"]  # type: ignore[index]  # keys are no parameters alone
        known["largest"] = torch.maximum(known.get("largest", torch.zeros(())), total)
        known["number"] = known.get("number", 0) + 1
        for group, p in every:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad)
            p.sub_(state["mean"] * (group["lr"] / known["largest"].sqrt()))


class Drawing(torch.optim.Optimizer):
    """Noise in proportion to a parameter's norm."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p) * p.norm(), alpha=-group["lr"])


class Closing(torch.optim.Optimizer):
    """A step that computes the loss itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any) -> None:  # type: ignore[override]  # returns no loss
        closure()


def in_groups(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    """An optimizer over every second parameter in each of two groups, one with another learning rate."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return kind([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}], **options)

    return make


MAKES: dict[str, tuple[type[nn.Module], Make]] = {
    "Muon": (Matrices, lambda m: torch.optim.Muon(m.parameters(), lr=0.02)),
    "Muon, groups": (Matrices, in_groups(torch.optim.Muon, momentum=0.8, adjust_lr_fn="match_rms_adamw")),
    "Muon, no Nesterov": (Matrices, lambda m: torch.optim.Muon(m.parameters(), lr=0.02, nesterov=False, ns_steps=3)),
    "Adafactor": (Mixed, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05, weight_decay=0.01)),
    "by norms": (Mixed, lambda m: ByNorms(m.parameters())),
    "by norms, groups": (WithEmpty, in_groups(ByNorms)),
    "by all norms": (Mixed, lambda m: ByAllNorms(m.parameters())),
    "by all norms, groups": (WithEmpty, in_groups(ByAllNorms)),
    "by all norms, layers": (Matrices, lambda m: ByAllNorms(m.parameters())),
}


class Tied(nn.Module):
    """Tokens and logits with one weight, and attention whose three projections are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(11, 6), nn.Linear(6, 18, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x.abs() * 7).long() % 11)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(hidden + attended.squeeze(1))
        return logits.logsumexp(-1).mean()


class Experts(nn.Module):
    """Matrices of three experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.Parameter(torch.randn(3, 6, 7) / 3), nn.Linear(7, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(torch.einsum("bi,eij->bj", x, self.experts)))
        return outputs.square().mean()


class ByMatrices(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised one by one: those of a parameter of more dimensions are a batch, and
    those of ``heads`` rows each lie below one another."""

    def __init__(self, params: Any, lr: float = 0.05, heads: int = 1) -> None:
        super().__init__(params, {"lr": lr, "heads": heads})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                x = buffer.reshape(group["heads"], -1, p.shape[-1]) if p.dim() == 2 else buffer
                x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.mT) @ x
                p.sub_(x.reshape(p.shape), alpha=group["lr"])


def _in_bfloat16(**options: Any) -> Make:
    return lambda model: torch.optim.Muon(model.bfloat16().parameters(), lr=0.02, **options)


TRAPS: dict[str, tuple[type[nn.Module], Make]] = {
    "tied and fused": (Tied, lambda m: torch.optim.Muon(m.parameters(), lr=0.02)),
    "projections by heads": (
        Tied,
        lambda m: ByMatrices(
            [{"params": [m.get_parameter("embedding.weight")]}, {"params": [m.get_parameter("qkv.weight")], "heads": 3}]
        ),
    ),
    "experts": (Experts, lambda m: ByMatrices(m.parameters())),
    "bfloat16": (Matrices, _in_bfloat16()),
    "bfloat16, no Nesterov": (Matrices, _in_bfloat16(nesterov=False)),
}


def _torchao(kind: str) -> Make:
    """An optimizer of torchao, which takes a second to import."""
    return lambda model: getattr(importlib.import_module("torchao.optim"), kind)(model.parameters(), lr=0.01)


def _bitsandbytes(kind: str) -> Make:
    return lambda model: getattr(importlib.import_module("bitsandbytes.optim"), kind)(model.parameters(), lr=0.01)


IN_FEW_BITS: dict[str, tuple[type[nn.Module], Make]] = {
    **{f"torchao {kind}": (Uneven, _torchao(kind)) for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{f"bitsandbytes {kind}": (Uneven, _bitsandbytes(kind)) for kind in ("AdamW8bit", "Adam8bit", "Lion8bit")},
}
