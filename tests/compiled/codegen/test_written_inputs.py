"""Compiled regions that write into what they have copied before: the copies are of what was there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib import compiling
from tests.lib.fakes import fake_like

pytestmark = compiling.regions


def _swap(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
    a, b = inputs
    inputs.clear()
    aten = torch.ops.aten
    before = aten.clone.default(a)
    taken = aten.copy.default(a, b)
    aten.copy_.default(a, taken)
    aten.copy_.default(b, aten.copy.default(b, before))
    return aten.eq.Tensor(taken, before), aten.add.Tensor(taken, taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_two_inputs_change_places(dtype: torch.dtype) -> None:
    from zerofx.codegen.inductor.compile import compile_region

    compiled = compile_region(_swap, [fake_like([8], [1], dtype, "cpu")] * 2, "swap")
    a, b = torch.tensor([3, 0, 1, 0, 2, 0, 4, 5]).to(dtype), torch.tensor([0, 1, 1, 2, 0, 0, 7, 0]).to(dtype)
    expected_written, written = [a.clone(), b.clone()], [a.clone(), b.clone()]
    expected, found = _swap([*expected_written]), compiled.call([*written])
    assert torch.equal(written[0], b) and torch.equal(written[1], a)
    for one, other in zip((*expected, *expected_written), (*found, *written), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_copy_in_another_dtype_is_of_what_was_there() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def noted(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        flags, x = inputs
        inputs.clear()
        were = torch.ops.aten.copy.default(flags, x)
        torch.ops.aten.copy_.default(x, torch.ops.aten.mul.Tensor(x, torch.ops.aten.sub.Tensor(x, x)))
        return (were,)

    fakes = [fake_like([4], [1], torch.bool, "cpu"), fake_like([4], [1], torch.float32, "cpu")]
    x = torch.tensor([0.0, 0.5, -2.0, 0.0])
    (found,) = compile_region(noted, fakes, "noted").call([torch.zeros(4, dtype=torch.bool), x])
    assert found.tolist() == [False, True, True, False] and x.tolist() == [0.0] * 4
