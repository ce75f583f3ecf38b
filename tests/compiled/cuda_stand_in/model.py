"""A model and its batch on a stand-in for a CUDA device: no values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import zerofx

VOCAB, DIM, HEADS, DEPTH, TOKENS = 1000, 128, 4, 3, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.packed, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            one.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2) for one in self.packed(self.norm(x)).chunk(3, -1)
        )
        # The operator that torch has for this on a GPU: which one it takes is asked of the device.
        seen = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return found


class Model(nn.Module):
    """A small GPT that also makes tensors on the device of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def plan(index: int, *, sequences: int = 4, **options: Any) -> zerofx.PlannedStep:
    """A step of the model on the CUDA device ``index``, for H100s."""
    with torch.device("meta"):
        model = Model()
    with FakeTensorMode():
        ids = torch.zeros(sequences, TOKENS, dtype=torch.long, device=f"cuda:{index}")
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofx.plan(model, optimizer, (ids, ids), machine="h100-sxm", precision="bf16", **options)
