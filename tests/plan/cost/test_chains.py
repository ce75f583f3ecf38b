from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lib.chains import MLP, Attention, Stack
from tests.lib.graphs import captured
from zerofx.scheduler.analysis.tile_chains import find_chains

aten = torch.ops.aten


def test_a_gated_mlp_is_one_chain() -> None:
    step = captured(Stack(MLP(4, 16, gated=True, bias=False, activation="silu")), torch.randn(2, 3, 4))
    (chain,) = find_chains(step)
    assert chain.num_rows == 6
    assert len([n for n in chain.forward.nodes if n.target is aten.mm.default]) == 3


def test_unfused_logits_are_tiled_by_heads_and_fused_attention_by_samples() -> None:
    x = torch.randn(3, 32, 8)
    (unfused,) = find_chains(captured(Stack(Attention(8, 2, fused=False)), x))
    assert unfused.product.target is aten.bmm.default and unfused.num_rows == 6
    (fused,) = find_chains(captured(Stack(Attention(8, 2, fused=True)), x))
    assert fused.product.target is aten.addmm.default and fused.num_rows == 3


def test_random_operators_are_not_tiled() -> None:
    class Dropping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(F.dropout(F.relu(self.up(x)), 0.5))
            return result

    assert find_chains(captured(Stack(Dropping(4, 16, False, True, "relu")), torch.randn(8, 4))) == []


def test_a_large_value_that_something_needs_whole_is_left_alone() -> None:
    class Leaking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            inner = F.relu(self.up(x))
            result: Tensor = self.out(inner) + inner.cumsum(0).mean()
            return result

    assert find_chains(captured(Stack(Leaking(4, 16, False, True, "relu")), torch.randn(8, 4))) == []
