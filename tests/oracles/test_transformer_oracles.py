"""Activation bytes and FLOPs of a traced transformer, against the formulas of Korthikanti et al. (2205.05198)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.activation_table import SEQUENCE, SHAPES
from benchmarks.activation_table import kept_values as kept
from benchmarks.lib.megatron import traced
from tests.lib.formulas import Transformer
from zerofx.ir.text import target_name
from zerofx.passes.activations.recompute import recompute
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_flops
from zerofx.scheduler.decide.activations import menu, segments

MIB = 2**20

# MiB that a layer keeps.
MIBS = {"22B": 6752, "175B": 2736, "530B": 3920, "1T": 4900}
TABLE = {name: (shape.heads, shape.hidden, shape.batch, MIBS[name]) for name, shape in SHAPES.items()}
VOCABULARY = 51200


def statistics_bytes(batch: int) -> int:
    """What the paper leaves out as small: mean and 1 / deviation of each token for two layer norms.

    A CPU keeps them in the dtype of the weights, two bytes each.
    """
    return 2 * 2 * 2 * SEQUENCE * batch


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TABLE)
def test_a_traced_layer_keeps_what_the_paper_counts(name: str) -> None:
    heads, hidden, batch, mib = TABLE[name]
    found = sum(kept(traced(hidden, heads, batch, sequence=SEQUENCE)).values())
    assert Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch) == mib * MIB
    assert found == mib * MIB + statistics_bytes(batch)


def test_a_traced_layer_keeps_what_the_paper_lists_item_by_item() -> None:
    heads, hidden, batch, _ = TABLE["22B"]
    found = Counter[str]()
    for value, size in kept(traced(hidden, heads, batch, sequence=SEQUENCE)).items():
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
    step = traced(hidden, heads, batch, sequence=SEQUENCE)
    scores = [value for value in kept(step) if target_name(value) in ("aten._softmax.default", "aten.mul.Tensor")]
    recompute(step, frozenset(value.name for value in scores), frozenset())
    mask = heads * SEQUENCE**2 * batch
    selective = Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch, recompute="selective")
    assert selective == mib * MIB - 5 * mask
    assert sum(kept(step).values()) == selective + mask + statistics_bytes(batch)


def test_the_least_that_a_layer_may_keep_is_its_input_and_its_masks() -> None:
    """Full recomputation keeps 2 sbh in the paper; to that come the masks, which are not drawn twice."""
    heads, hidden, batch, _ = TABLE["175B"]
    step = traced(hidden, heads, batch, sequence=SEQUENCE)
    (middle,) = [segment for segment in segments(step) if segment.unit == "layers.1"]
    least = menu(middle, Machine.named("h100-sxm"))[-1]
    sbh, mask = SEQUENCE * batch * hidden, heads * SEQUENCE**2 * batch
    masks = mask + 2 * sbh
    # A menu counts the input, which the layer before has made, and the result, which the next layer reads.
    full = Transformer(3, hidden, heads, SEQUENCE).layer_bytes(batch, recompute="full")
    assert least.num_bytes == 2 * full + masks


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TABLE)
def test_matrix_products_of_a_traced_step_are_the_papers_flops(name: str) -> None:
    """72 B L s h^2 (1 + s / 6h + v / 12hL), exactly; everything else in a step is less than a hundredth of it."""
    heads, hidden, batch, _ = TABLE[name]
    step = traced(hidden, heads, batch, sequence=SEQUENCE, depth=2, vocabulary=VOCABULARY)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    flops = Counter[bool]()
    for node in step.calls():
        flops[node.target in products] += node_flops(node)
    model = Transformer(2, hidden, heads, SEQUENCE, VOCABULARY)
    assert flops[True] == pytest.approx(model.model_flops(batch), rel=1e-12)
    assert flops[False] < 0.01 * flops[True]
