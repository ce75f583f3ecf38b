"""Loops of compiled regions write over what they are the last to read, and give what eager mode gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import compiling
from tests.lib.fakes import fake_like

pytestmark = compiling.regions

aten: Any = torch.ops.aten
ROWS, DIM = 24, 40
Region = Callable[[list[Any]], tuple[Tensor, ...]]


def _gated(inputs: list[Any]) -> tuple[Tensor, ...]:
    """The backward of a gated layer that computes its products again: what three loops make of three products."""
    x, grad, to_gate, to_up, from_hidden = inputs
    inputs.clear()
    gate, up = aten.mm.default(x, to_gate), aten.mm.default(x, to_up)
    grad_hidden = aten.mm.default(grad, from_hidden)
    opened = aten.silu.default(gate)
    hidden = aten.mul.Tensor(opened, up)
    of_down = aten.mm.default(aten.t.default(grad), hidden)
    del hidden
    grad_up = aten.mul.Tensor(grad_hidden, opened)
    of_up = aten.mm.default(aten.t.default(x), grad_up)
    del grad_up, opened
    grad_gate = aten.silu_backward.default(aten.mul.Tensor(grad_hidden, up), gate)
    return of_down, of_up, aten.mm.default(aten.t.default(x), grad_gate)


def _read_elsewhere(inputs: list[Any]) -> tuple[Tensor, ...]:
    """As two loops of one kernel, of which the first reads other elements of what the second could be written over."""
    x, weight = inputs
    inputs.clear()
    product = aten.mm.default(x, weight)
    turned, doubled = aten.flip.default(product, [1]), aten.mul.Tensor(product, 2.0)
    return aten.mm.default(turned, weight), aten.mm.default(doubled, weight)


def _kept(inputs: list[Any]) -> tuple[Tensor, ...]:
    """What two loops read leaves the region."""
    x, weight = inputs
    inputs.clear()
    product = aten.mm.default(x, weight)
    more, less = aten.add.Tensor(product, 1.0), aten.sub.Tensor(product, 1.0)
    return product, aten.mm.default(more, weight), aten.mm.default(less, weight)


def _reduced(inputs: list[Any]) -> tuple[Tensor, ...]:
    """A sum stands among the loops that read a product."""
    x, weight = inputs
    inputs.clear()
    product = aten.mm.default(x, weight)
    doubled, total = aten.mul.Tensor(product, 2.0), aten.sum.dim_IntList(product, [1], True)
    shifted = aten.sub.Tensor(product, total)
    return aten.mm.default(doubled, weight), aten.mm.default(shifted, weight), total


def _dropped(inputs: list[Any]) -> tuple[Tensor, ...]:
    """Two loops read what an operator has drawn into memory."""
    x, weight = inputs
    inputs.clear()
    product = aten.mm.default(x, weight)
    mask = aten.bernoulli.p(product, 0.5)
    kept, shifted = aten.mul.Tensor(product, mask), aten.add.Tensor(product, mask)
    return aten.mm.default(kept, weight), aten.mm.default(shifted, weight)


def _accumulated(inputs: list[Any]) -> tuple[Tensor, ...]:
    """Two loops read a product that an operator has added to."""
    x, weight = inputs
    inputs.clear()
    places = aten.arange.default(DIM, device=torch.device("cpu"))
    product = aten.index_put_.default(aten.mm.default(x, weight), [places], weight, True)
    doubled, more = aten.mul.Tensor(product, 2.0), aten.add.Tensor(product, 1.0)
    return aten.mm.default(doubled, weight), aten.mm.default(more, weight)


def _in_turn(inputs: list[Any]) -> tuple[Tensor, ...]:
    """Draws of several kinds, of which some are not read, and the last is read first."""
    x, weight = inputs
    inputs.clear()
    aten.bernoulli.p(x, 0.5)
    first = aten.bernoulli.p(aten.t.default(x), 0.3)
    noise = aten.randn.default([DIM, DIM], device=torch.device("cpu"))
    chosen = aten.bernoulli.default(aten.t.default(aten.sigmoid.default(x)))
    last = aten.bernoulli.p(aten.mul.Tensor(x, 2.0), 0.5)
    product = aten.mm.default(aten.mul.Tensor(weight, last), weight)
    return product, aten.mm.default(aten.add.Tensor(chosen, noise), weight), aten.mul.Tensor(first, x)


def _most_held(function: Region, given: list[Tensor]) -> int:
    """Compile a region, check it against eager mode, and return the most bytes that it holds beside its inputs."""
    from zerofx.codegen.inductor.compile import compile_region

    fakes = [fake_like(one.shape, one.stride(), one.dtype, "cpu") for one in given]
    compiled = compile_region(function, fakes, function.__name__)
    torch.manual_seed(1)
    results = compiled.call([*given])
    torch.manual_seed(1)
    for found, expected in zip(results, function([*given]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    return max(itertools.accumulate(event.num_bytes for event in compiled.memory))


def test_a_gated_layer_holds_four_values_instead_of_six() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    weights = [torch.randn(8, DIM) for _ in range(3)]
    assert _most_held(_gated, [x, grad, *weights]) == 4 * ROWS * DIM * 4


def test_a_value_whose_other_elements_are_read_is_not_written_over() -> None:
    torch.manual_seed(0)
    assert _most_held(_read_elsewhere, [torch.randn(DIM, DIM), torch.randn(DIM, DIM)]) == 3 * DIM * DIM * 4


def test_a_value_that_leaves_the_region_is_not_written_over() -> None:
    torch.manual_seed(0)
    assert _most_held(_kept, [torch.randn(DIM, DIM), torch.randn(DIM, DIM)]) >= 4 * DIM * DIM * 4


@pytest.mark.parametrize("function", [_dropped, _accumulated])
def test_what_operators_write_into_is_read_as_they_leave_it(function: Region) -> None:
    torch.manual_seed(0)
    assert _most_held(function, [torch.randn(DIM, DIM), torch.randn(DIM, DIM)]) >= 3 * DIM * DIM * 4


def test_draws_are_those_of_eager_mode_whatever_is_read_and_when() -> None:
    torch.manual_seed(0)
    assert _most_held(_in_turn, [torch.randn(DIM, DIM), torch.randn(DIM, DIM)])


def test_loops_beside_a_sum_give_what_they_should() -> None:
    torch.manual_seed(0)
    assert _most_held(_reduced, [torch.randn(DIM, DIM), torch.randn(DIM, DIM)]) >= 2 * DIM * DIM * 4
