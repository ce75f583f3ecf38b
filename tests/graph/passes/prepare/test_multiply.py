"""Products in fp8: what stands in the graph for them, and that CUDA has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.captures import captured_graph
from tests.lib.graphs import number_values
from zerofx.capture.traceable import Forward
from zerofx.errors import PlanError
from zerofx.ir.aliasing import tensors_of
from zerofx.ir.batch import Batch
from zerofx.ir.facts import value
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.multiply import Multiply
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.verify import verify
from zerofx.scheduler.analysis.linear_products import find_linear_products
from zerofx.scheduler.plan.decisions import ProductDecision


class Layers(nn.Module):
    """A layer with a bias, two that read one value, and one whose weight lies as it is multiplied, all in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32, dtype=torch.bfloat16)
        self.up, self.gate = (nn.Linear(32, 48, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Parameter(torch.randn(48, 16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.first(x))
        loss: Tensor = (self.up(hidden) * self.gate(hidden) @ self.down).float().square().mean()
        return loss


def captured() -> StepGraph:
    batch = Batch.from_call((torch.randn(64, 16, dtype=torch.bfloat16),), {})
    step = captured_graph(Forward(Layers(), batch))
    simplify(step)
    return step


def decisions(step: StepGraph, *, in_fp8: bool = True) -> tuple[ProductDecision, ...]:
    products = find_linear_products(step)
    return tuple(ProductDecision(p.node.name, p.weight, p.left, p.right, in_fp8, "as asked") for p in products)


def test_products_with_a_weight_and_those_for_its_gradient_are_known() -> None:
    found = [(decision.weight, decision.gives) for decision in decisions(captured())]
    assert found == [
        ("first.weight", "output"),
        ("up.weight", "output"),
        ("gate.weight", "output"),
        ("down", "output"),
        ("down", "weight gradient"),
        ("down", "input gradient"),
        ("gate.weight", "weight gradient"),
        ("gate.weight", "input gradient"),
        ("up.weight", "weight gradient"),
        ("up.weight", "input gradient"),
        ("first.weight", "weight gradient"),
    ]
    of_down = [(decision.left, decision.right) for decision in decisions(captured()) if decision.weight == "down"]
    assert of_down == [("input", "weight"), ("input", "gradient"), ("gradient", "weight")]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_factors_are_cast_in_front_of_products_that_cuda_has(recipe: str, golden: Any) -> None:
    step = captured()
    low = [d for d in decisions(step) if "weight" in (d.left, d.right) or recipe != "rowwise_with_gw_hp"]
    Multiply(recipe, tuple(low)).run(step)
    verify(step, "multiply")
    golden(number_values(step.text()))
    products = list(step.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default))
    assert len(products) == len(low)
    for product in products:
        left, right = map(value, product.args[:2])
        assert left.is_contiguous() and right.t().is_contiguous()
        assert right.shape[0] % 16 == right.shape[1] % 16 == 0
        assert (left.dtype, right.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
        is_by_row = value(product.args[2]).numel() > 1
        assert not is_by_row or tensors_of(product)[0].dtype == torch.bfloat16


def test_a_value_that_two_layers_read_is_cast_once() -> None:
    step = captured()
    Multiply("tensorwise", decisions(step)).run(step)
    casts = list(step.graph.find_nodes(op="call_function", target=torch.ops.zerofx.fp8_cast.default))
    scales = list(step.graph.find_nodes(op="call_function", target=torch.ops.zerofx.fp8_scale.default))
    # Of 11 products: up and gate read one input, in forward and for their weights' gradients.
    assert len(casts) == 22 - 2
    assert len(scales) < len(casts)  # a gradient is scaled for both products that read it


def test_what_is_decided_against_stays_as_it_is() -> None:
    step = captured()
    text = step.text()
    Multiply("rowwise", decisions(step, in_fp8=False)).run(step)
    assert step.text() == text and step.products


def test_a_decision_about_what_is_no_product_is_refused() -> None:
    step = captured()
    silu = next(node.name for node in step.calls() if "silu" in node.name)
    with pytest.raises(PlanError, match=f"the plan has {silu} in fp8, which is no product"):
        Multiply("rowwise", (ProductDecision(silu, "up.weight", "input", "weight", True, ""),)).run(step)
    with pytest.raises(PlanError, match="names node nowhere, which this graph has not"):
        Multiply("rowwise", (ProductDecision("nowhere", "up.weight", "input", "weight", True, ""),)).run(step)
