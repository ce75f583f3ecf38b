"""Products of a region that are taken from ATen on a CPU, and those that stay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.codegen.cpu.rewrites import take_products
from zerofx.ir import ops

aten = torch.ops.aten


def test_products_of_some_size_are_taken_from_aten_with_their_biases() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        forward = aten.addmm(bias, x, weight.t())
        return torch.relu(forward), aten.mm(grad, weight), aten.mm(grad.t(), x), aten.mm(small, small)

    sizes = ((256, 200), (180, 200), (180,), (256, 180), (70, 70))
    inputs = [torch.randn(*size) for size in sizes]
    traced = make_fx(layer, tracing_mode="fake")(*inputs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        take_products(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for result, expected in zip(traced(*inputs), layer(*inputs), strict=True):
        assert result.shape == expected.shape and result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)
    taken = [node for node in traced.graph.nodes if node.target is ops.product]
    assert [node.args[2] is None for node in taken] == [False, True, True]
    (left,) = (node for node in traced.graph.nodes if node.target is aten.mm.default)
    assert left.meta["val"].shape == (70, 70)
