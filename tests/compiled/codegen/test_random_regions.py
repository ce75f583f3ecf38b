"""Compiled regions that draw random numbers: the draws of eager mode, read once they are there."""

from __future__ import annotations

from typing import Any

import torch

from tests.lib import compiling
from tests.lib.fakes import fake_like

pytestmark = compiling.regions


def _dropout_of_a_layer(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
    x, weight, bias = inputs
    inputs.clear()
    aten = torch.ops.aten
    hidden = aten.addmm.default(bias, x, weight).view(2, 8, 32).relu()
    kept = aten.bernoulli.p(torch.empty(2, 8, 32, dtype=torch.bool), 0.5)
    return hidden, kept, aten.mm.default((hidden * kept).view(16, 32), weight.t())


def test_a_buffer_is_read_after_what_is_written_into_it() -> None:
    """Inductor of torch 2.13 fuses the read with what was before the write where it fits their loops to each other."""
    from zerofx.codegen.inductor.compile import compile_region

    given = [torch.randn(16, 16), torch.randn(16, 32), torch.randn(32)]
    compiled = compile_region(
        _dropout_of_a_layer, [fake_like(one.shape, one.stride(), one.dtype, "cpu") for one in given], "order"
    )
    torch.manual_seed(0)
    expected = _dropout_of_a_layer(list(given))
    torch.manual_seed(0)
    for one, other in zip(expected, compiled.call(list(given)), strict=True):
        torch.testing.assert_close(one, other)


def test_random_numbers_are_those_of_eager_mode() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def noise(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        (x,) = inputs
        inputs.clear()
        drawn = torch.ops.aten.randn_like.default(x.transpose(0, 1))
        made = torch.ops.aten.rand.default([5, 3], device="cpu", pin_memory=False) * x[0, 0]
        return drawn + 1, made, torch.ops.aten.bernoulli.default(made) * 2

    compiled = compile_region(noise, [fake_like([4, 6], [6, 1], torch.float32, "cpu")], "noise")
    x = torch.ones(4, 6)
    torch.manual_seed(0)
    expected = noise([x])
    torch.manual_seed(0)
    for one, other in zip(expected, compiled.call([x]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
