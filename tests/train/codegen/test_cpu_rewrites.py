"""Rewrites for a CPU: which sums become products, which biases are added by readers, and that values stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.codegen.cpu.rewrites import rewrite_for_cpu
from zerofx.ir import ops

aten = torch.ops.aten
SUM, MM, ADDMM = aten.sum.dim_IntList, aten.mm.default, aten.addmm.default


def rewritten(function: Callable[..., Any], *inputs: Tensor, products: bool = False) -> fx.GraphModule:
    """The traced function after the rewrites, which has to give what it gave before."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        rewrite_for_cpu(traced.graph, products=products)
    traced.graph.lint()
    traced.recompile()
    for one, other in zip(traced(*inputs), function(*inputs), strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    return traced


def count(traced: fx.GraphModule, target: Callable[..., Any]) -> int:
    return len(traced.graph.find_nodes(op="call_function", target=target))


def bias_gradient(grad: Tensor, weight: Tensor, dims: Sequence[int] = (0,), keepdim: bool = True) -> tuple[Tensor, ...]:
    flat = grad.view(-1, grad.shape[-1])
    return aten.mm(flat, weight), aten.sum.dim_IntList(grad, dims, keepdim)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize(("shape", "dims"), [((96, 80), [0]), ((2, 48, 80), [0, 1]), ((2, 48, 80), [-2, 0])])
def test_a_sum_over_the_rows_of_a_stored_value_becomes_a_product(
    shape: tuple[int, ...], dims: list[int], keepdim: bool
) -> None:
    traced = rewritten(lambda g, w: bias_gradient(g, w, dims, keepdim), torch.randn(shape), torch.randn(80, 70))
    assert (count(traced, SUM), count(traced, MM)) == (0, 2)


def test_a_value_that_is_only_summed_stays_in_its_loop() -> None:
    traced = rewritten(lambda x, y: (aten.sum.dim_IntList(x * y, [0]),), torch.randn(96, 80), torch.randn(96, 80))
    assert (count(traced, SUM), count(traced, MM)) == (1, 0)


def test_a_norms_sums_share_one_loop() -> None:
    """The gradients of its weight and bias: one is of a product's result, the other of what is made of it."""

    def norm(a: Tensor, b: Tensor, normalised: Tensor) -> tuple[Tensor, ...]:
        grad = aten.mm(a, b)
        return aten.sum.dim_IntList(grad * normalised, [0]), aten.sum.dim_IntList(grad, [0])

    traced = rewritten(norm, torch.randn(96, 70), torch.randn(70, 80), torch.randn(96, 80))
    assert (count(traced, SUM), count(traced, MM)) == (2, 1)


@pytest.mark.parametrize(
    ("grad", "dims"),
    [
        (torch.randn(20, 80), [0]),
        (torch.randn(96, 20), [0]),
        (torch.randn(96, 80), [1]),
        (torch.randn(80, 96).t(), [0]),
        (torch.randn(96, 80).to(torch.bfloat16), [0]),
    ],
    ids=["few rows", "few columns", "over columns", "transposed", "half precision"],
)
def test_other_sums_are_left_alone(grad: Tensor, dims: list[int]) -> None:
    def summed(grad: Tensor) -> tuple[Tensor, ...]:
        return (aten.sum.dim_IntList(grad, dims),)

    assert count(rewritten(summed, grad), SUM) == 1


def linear(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


LINEAR = (torch.randn(6), torch.randn(4, 5), torch.randn(5, 6))


def test_a_bias_is_added_where_loops_read_the_product() -> None:
    def layer(*given: Tensor) -> tuple[Tensor, ...]:
        result = linear(*given)
        return result, aten.gelu(result.view(2, 2, 6))

    traced = rewritten(layer, *LINEAR)
    assert (count(traced, ADDMM), count(traced, MM)) == (0, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda *given: (linear(*given),),
        lambda *given: (aten.mm(linear(*given), given[2].t()),),
        lambda *given: (aten.relu(aten.addmm(*given, beta=2.0)),),
        lambda bias, x, weight: (aten.relu(aten.addmm(bias.expand(4, 6).clone(), x, weight)),),
    ],
    ids=["only returned", "read by a product", "scaled", "a whole matrix"],
)
def test_other_biases_stay_with_their_product(function: Callable[..., Any]) -> None:
    assert count(rewritten(function, *LINEAR), ADDMM) == 1


def test_what_can_be_is_taken_from_aten_behind_all_other_rewrites() -> None:
    """A layer's bias is added by the loop that reads it; a product with ones and a small one stay."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        forward = torch.relu(aten.addmm(bias, x, weight.t()))
        return forward, *bias_gradient(grad, weight), aten.mm(grad.t(), x), aten.mm(small, small)

    given = [torch.randn(*size) for size in ((256, 200), (180, 200), (180,), (256, 180), (70, 70))]
    traced = rewritten(layer, *given, products=True)
    found = [node for node in traced.graph.nodes if node.target is ops.product]
    assert [node.args[2] for node in found] == [None] * 3
    assert (count(traced, ADDMM), count(traced, MM), count(traced, SUM)) == (0, 2, 0)
    untouched = rewritten(layer, *given)
    assert (count(untouched, ops.product), count(untouched, MM)) == (0, 5)


def test_a_bias_that_no_loop_reads_goes_with_its_product() -> None:
    given = [torch.randn(*size) for size in ((180,), (256, 200), (200, 180))]
    traced = rewritten(lambda bias, x, weight: (aten.addmm(bias, x, weight),), *given, products=True)
    (found,) = (node for node in traced.graph.nodes if node.target is ops.product)
    assert found.args[2] is not None and count(traced, ADDMM) == 0
