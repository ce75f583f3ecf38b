"""What a rank draws for its part of a value: its own numbers, of the rate asked for, and a generator that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.ir import ops
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.capture import fake_mode
from zerofx.torch_private.operators import OpOverload

aten = torch.ops.aten
ON_CPU = [
    target for target in OWN_DRAWS if "scaled_dot_product" not in str(target) and target is not ops.bernoulli_into
]
ARGUMENTS: dict[Any, tuple[Any, ...]] = {aten.bernoulli.p: (0.25,), aten.native_dropout.default: (0.75, True)}


def _drawn(target: OpOverload[..., Any], rank: int) -> Tensor:
    torch.manual_seed(3)
    drawn = OWN_DRAWS[target](torch.full((64, 64), 0.25), *ARGUMENTS.get(target, ()), rank=torch.tensor(rank))
    result = drawn[1] if isinstance(drawn, tuple) else drawn
    assert isinstance(result, Tensor)
    return result.float()


@pytest.mark.parametrize("target", ON_CPU, ids=str)
def test_ranks_draw_for_themselves_and_go_on_together(target: OpOverload[..., Any]) -> None:
    ranks, after = [], []
    for rank in (0, 1, 2, 1):
        ranks.append(_drawn(target, rank))
        after.append(torch.get_rng_state())
    assert torch.equal(ranks[1], ranks[3])
    for first, second in ((0, 1), (1, 2), (0, 2)):
        # Draws that have nothing to do with each other: correlated by less than 4 standard deviations.
        pair = torch.stack([ranks[first].flatten(), ranks[second].flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / 64
    assert all(torch.equal(after[0], state) for state in after)


@pytest.mark.parametrize("target", ON_CPU[:3], ids=str)
def test_as_many_are_drawn_as_are_asked_for(target: OpOverload[..., Any]) -> None:
    share = torch.stack([_drawn(target, rank) for rank in range(8)]).mean()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / (8 * 64 * 64)) ** 0.5


def test_compiled_regions_draw_the_same() -> None:
    expected, into = _drawn(aten.bernoulli.p, 1), torch.empty(64, 64)
    torch.manual_seed(3)
    OWN_DRAWS[ops.bernoulli_into](into, None, 0.25, rank=torch.tensor(1))
    assert torch.equal(into, expected)


@pytest.mark.parametrize("target", OWN_DRAWS, ids=str)
def test_a_draw_of_ones_own_has_the_facts_of_the_other(target: OpOverload[..., Any]) -> None:
    own = OWN_DRAWS[target]
    assert torch.Tag.nondeterministic_seeded in own.tags
    assert (facts_of(own).traffic, facts_of(own).inductor) == (facts_of(target).traffic, facts_of(target).inductor)
    is_attention = "scaled_dot_product" in str(target)
    assert (facts_of(own).counted_as is not None) == is_attention


def test_attention_makes_what_the_other_does() -> None:
    target = aten._scaled_dot_product_efficient_attention.default
    with fake_mode():
        heads, rank = torch.empty(2, 4, 8, 16), torch.empty((), dtype=torch.int64)
        args = (heads, heads, heads, None, True, 0.1)
        pairs = list(zip(target(*args), OWN_DRAWS[target](*args, rank=rank), strict=True))
    assert all((one.shape, one.dtype) == (own.shape, own.dtype) for one, own in pairs)
