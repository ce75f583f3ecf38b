"""The transformer of Korthikanti et al. (2205.05198) as its authors train it, operator by operator: what they count.

Tokens come first: values are [sequence, batch, hidden]. Attention is not fused, so that its scores are there to be
counted; dropout of a tenth follows the scores, attention and the MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.capture.trace import Batch, capture
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.simplify import simplify


class Attention(nn.Module):
    """Attention of every token to those before it, operator by operator; tokens come first: [s, b, h]."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.future: Tensor
        self.register_buffer("future", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        width = h // self.heads
        # Batched products take strided views: queries, keys and values stay the one storage that the layer made.
        q, k, v = self.qkv(x).view(s, b * self.heads, 3 * width).split(width, dim=2)
        scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0)) * width**-0.5
        shares = F.dropout(F.softmax(scores.masked_fill(self.future, -1e4), dim=-1), 0.1, training=True)
        mixed: Tensor = self.out(torch.bmm(shares, v.transpose(0, 1)).transpose(0, 1).reshape(s, b, h))
        return mixed


class Layer(nn.Module):
    """A layer as in Megatron-LM: layer norms in front, dropout after attention and MLP."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, sequence)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1, training=True)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, training=True)


class Megatron(nn.Module):
    def __init__(self, hidden: int, heads: int, sequence: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, sequence) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def traced(hidden: int, heads: int, batch: int, *, sequence: int, depth: int = 3, vocabulary: int = 128) -> StepGraph:
    """The step of such a model in bfloat16, captured without values."""
    with torch.device("meta"):
        model = Megatron(hidden, heads, sequence, depth, vocabulary)
        ids = torch.empty(sequence, batch, dtype=torch.long)
    step = capture(model, Batch.from_call((ids,), {}), compute_dtype=torch.bfloat16)
    simplify(step)
    return step
