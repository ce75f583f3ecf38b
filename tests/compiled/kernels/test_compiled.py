"""Compiled regions call the operators that have kernels, rather than generate code in their place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.lib import compiling
from zerofx.ir import ops
from zerofx.ir.op_kernels import quantise, softmax
from zerofx.ir.op_kernels.quantise import BLOCK

pytestmark = [pytest.mark.slow, *compiling.regions]


def _rounded(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
    (values,) = inputs
    inputs.clear()
    packed = ops.quantise(values, 2, "fp8")
    return packed, ops.dequantise_sum(packed, 2, "fp8", torch.float32)


def _launched(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
    (values,) = inputs
    inputs.clear()
    packed = torch.ops.zerofx.launch_quantise.default(values, 2, "fp8")
    return packed, torch.ops.zerofx.launch_dequantise_sum.default(packed, 2, "fp8", torch.float32)


@pytest.mark.parametrize("function", [_rounded, _launched])
def test_rounding_is_launched_where_the_file_says_so(function: Any) -> None:
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor.compile import compile_region
    from zerofx.codegen.inductor.memory_record import memory_record

    values = torch.randn(4 * BLOCK)
    with mock.patch.object(inductor, "memory_record", wraps=memory_record) as recorded:
        packed, total = compile_region(function, [values], "rounded").call([values])
    code = recorded.call_args.args[0]
    expected = quantise.quantise(values, 2, "fp8")
    assert torch.equal(packed, expected)
    torch.testing.assert_close(total, quantise.dequantise_sum(expected, 2, "fp8", torch.float32))
    launches = "zerofx.launch_quantise" in code and "zerofx.launch_dequantise_sum" in code
    assert launches == (function is _launched)


def _gradient(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
    x, weight, target, log_sums, scale = inputs
    inputs.clear()
    logits = torch.ops.aten.mm.default(x, weight)
    ops.softmax_gradient(logits, target, 3, log_sums, scale, 1)
    return (torch.ops.aten.mm.default(torch.ops.aten.t.default(logits), x),)


def test_gradients_written_in_place_are_seen_by_the_products_behind_them() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    given = [torch.randn(6, 4), torch.randn(4, 5), torch.tensor([3, 4, 1, 0, 7, 9]), torch.randn(6), torch.tensor(0.5)]
    (found,) = compile_region(_gradient, given, "gradient").call(list(given))
    x, weight, target, log_sums, scale = given
    logits = x @ weight
    softmax.softmax_gradient(logits, target, 3, log_sums, scale, 1)
    torch.testing.assert_close(found, logits.t() @ x)
