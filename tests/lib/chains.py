"""Models of chains of operators with large values between them: wide layers and attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Wide inside; ``gated`` multiplies two projections."""

    def __init__(self, dim: int, inner: int, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(dim, inner, bias=bias)
        self.gate = nn.Linear(dim, inner, bias=bias) if gated else None
        self.out = nn.Linear(inner, dim, bias=bias)
        self.activation: Callable[[Tensor], Tensor] = getattr(F, activation)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.up(x))
        result: Tensor = self.out(inner if self.gate is None else inner * self.gate(x))
        return result


class Attention(nn.Module):
    """``fused``: torch's kernel; or logits, softmax and values one after the other, with a causal mask. ``mask``: what
    torch's kernel is given in place of its own causal one, "shared" by all samples, or "own" to each."""

    def __init__(self, dim: int, heads: int, fused: bool, mask: str | None = None) -> None:
        super().__init__()
        self.heads, self.fused, self.mask = heads, fused, mask
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if self.mask is not None:
            allowed = torch.ones(time, time, dtype=torch.bool).tril()
            if self.mask == "own":
                allowed = allowed & (x[:, None, None, :, 0] > -1.0)  # a query may see nothing at all
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        elif self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5
            allowed = torch.ones(time, time, dtype=torch.bool).tril()
            y = logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        return result


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, (self.attention, self.mlp), strict=True):
            x = x if inner is None else x + inner(norm(x))
        return x


class Stack(nn.Module):
    """Blocks and the mean of squares of what they give."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Equal(nn.Module):
    """Equal linear layers, nothing else that is trained, and the mean of squares of what they give."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def mlps(num_layers: int = 1, dim: int = 4, inner: int = 16) -> nn.Module:
    return Stack(
        *(Block(None, MLP(dim, inner, gated=False, bias=True, activation="gelu"), dim) for _ in range(num_layers))
    )
