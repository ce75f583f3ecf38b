"""Compiled regions call the operators that have kernels, rather than generate code in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib import compiling
from zerofx.ir import ops
from zerofx.ir.op_kernels import softmax

pytestmark = [pytest.mark.slow, *compiling.regions]


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
