"""A small GPT in plain PyTorch: nothing in this file knows how it will be trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with `heads` heads over vectors of `dim` numbers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim} and heads={heads}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only language model; the embedding and the output layer share one weight.

    Args:
        vocab: number of different tokens.
        dim: width of the residual stream.
        depth: number of layers.
        heads: attention heads per layer; must divide `dim`.
        block: longest sequence, in tokens.
    """

    def __init__(self, vocab: int, dim: int, depth: int, heads: int, block: int) -> None:
        super().__init__()
        self.block = block
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(block, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(std=0.5 * dim**-0.5)

    def _initialise(self, std: float) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Each layer adds to the residual stream twice, so what it adds starts smaller in a deeper model.
                share = (2 * len(self.layers)) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(weight, std=std * share)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocab] of `tokens` [batch, time]; with `targets` [batch, time] their loss, mean nats."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
    """Continue `prompt` [time] by `num_tokens` sampled tokens; gives the whole sequence [time + num_tokens]."""
    generator = torch.Generator(prompt.device).manual_seed(seed)
    tokens = prompt
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.block :])[0, -1]
        chosen = torch.multinomial(torch.softmax(logits.float() / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen])
    return tokens
