"""Activation bytes and FLOPs of a traced transformer, against the formulas of Korthikanti et al. (2205.05198)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.lib.formulas import Transformer
from zerofx.capture.trace import Batch, capture
from zerofx.ir.graph import StepGraph
from zerofx.ir.text import target_name
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.recompute import recompute
from zerofx.scheduler.analysis.saved_values import crossing_storages, storage_size, value_node
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_flops
from zerofx.scheduler.decide.activations import menu, segments

MIB = 2**20

# Table 3 of the paper: heads, hidden, micro-batch; MiB that a layer keeps.
TABLE = {
    "22B": (64, 6144, 4, 6752),
    "175B": (96, 12288, 1, 2736),
    "530B": (128, 20480, 1, 3920),
    "1T": (160, 25600, 1, 4900),
}
SEQUENCE = 2048
VOCABULARY = 51200


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


def traced(
    hidden: int, heads: int, batch: int, *, depth: int = 3, sequence: int = SEQUENCE, vocabulary: int = 128
) -> StepGraph:
    with torch.device("meta"):
        model = Megatron(hidden, heads, sequence, depth, vocabulary)
        ids = torch.empty(sequence, batch, dtype=torch.long)
    step = capture(model, Batch.of((ids,), {}), compute_dtype=torch.bfloat16)
    simplify(step)
    return step


def kept(step: StepGraph, unit: str = "layers.1") -> dict[fx.Node, int]:
    """What a layer makes in forward and backward reads, with bytes.

    The layer's own input is counted with the layer that made it, and its output with it: as many bytes.
    """
    return {value_node(s): storage_size(s) for s in crossing_storages(step) if step.unit_of(s[0]) == unit}


def statistics_bytes(batch: int) -> int:
    """What the paper leaves out as small: mean and 1 / deviation of each token for two layer norms.

    A CPU keeps them in the dtype of the weights, two bytes each.
    """
    return 2 * 2 * 2 * SEQUENCE * batch


@pytest.mark.parametrize("name", TABLE)
def test_a_traced_layer_keeps_what_the_paper_counts(name: str) -> None:
    heads, hidden, batch, mib = TABLE[name]
    found = sum(kept(traced(hidden, heads, batch)).values())
    assert Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch) == mib * MIB
    assert found == mib * MIB + statistics_bytes(batch)


def test_a_traced_layer_keeps_what_the_paper_lists_item_by_item() -> None:
    heads, hidden, batch, _ = TABLE["22B"]
    found = Counter[str]()
    for value, size in kept(traced(hidden, heads, batch)).items():
        found[target_name(value)] += size
    sbh, scores = SEQUENCE * batch * hidden, heads * SEQUENCE**2 * batch
    assert found == {
        # The layer norms' results, which are the inputs of QKV and of the MLP, and their statistics.
        "getitem": 2 * sbh + 2 * sbh + statistics_bytes(batch),
        # Queries, keys and values, in one; the input of the GELU.
        "aten.addmm.default": 6 * sbh + 8 * sbh,
        "aten._softmax.default": 2 * scores,
        # Dropout masks, a byte each: of the scores, after attention, after the MLP.
        "aten.bernoulli.p": scores + sbh + sbh,
        # The scores after their dropout, which multiply the values.
        "aten.mul.Tensor": 2 * scores,
        # The input of attention's last linear layer.
        "aten.clone.default": 2 * sbh,
        # The inputs of two layer norms: the sum after attention, and the layer's result as that of the next layer.
        "aten.add.Tensor": 2 * sbh + 2 * sbh,
        # The input of the MLP's second linear layer.
        "aten.gelu.default": 8 * sbh,
    }


def test_selective_recomputation_frees_all_of_the_scores_but_their_mask() -> None:
    """5 a s^2 b in the paper, which draws the mask again from a saved state; a plan never draws anything twice."""
    heads, hidden, batch, mib = TABLE["175B"]
    step = traced(hidden, heads, batch)
    scores = [value for value in kept(step) if target_name(value) in ("aten._softmax.default", "aten.mul.Tensor")]
    recompute(step, frozenset(value.name for value in scores), frozenset())
    mask = heads * SEQUENCE**2 * batch
    selective = Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch, recompute="selective")
    assert selective == mib * MIB - 5 * mask
    assert sum(kept(step).values()) == selective + mask + statistics_bytes(batch)


def test_the_least_that_a_layer_may_keep_is_its_input_and_its_masks() -> None:
    """Full recomputation keeps 2 sbh in the paper; to that come the masks, which are not drawn twice."""
    heads, hidden, batch, _ = TABLE["175B"]
    step = traced(hidden, heads, batch)
    (middle,) = [segment for segment in segments(step) if segment.unit == "layers.1"]
    least = menu(middle, Machine.named("h100-sxm"))[-1]
    sbh, mask = SEQUENCE * batch * hidden, heads * SEQUENCE**2 * batch
    masks = mask + 2 * sbh
    # A menu counts the input, which the layer before has made, and the result, which the next layer reads.
    full = Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch, recompute="full")
    assert least.num_bytes == 2 * full + masks


@pytest.mark.parametrize("name", TABLE)
def test_matrix_products_of_a_traced_step_are_the_papers_flops(name: str) -> None:
    """72 B L s h^2 (1 + s / 6h + v / 12hL), exactly; everything else in a step is less than a hundredth of it."""
    heads, hidden, batch, _ = TABLE[name]
    step = traced(hidden, heads, batch, depth=2, vocabulary=VOCABULARY)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    flops = Counter[bool]()
    for node in step.calls():
        flops[node.target in products] += node_flops(node)
    model = Transformer(2, hidden, heads, SEQUENCE, VOCABULARY)
    assert flops[True] == pytest.approx(model.model_flops(batch), rel=1e-12)
    assert flops[False] < 0.01 * flops[True]
