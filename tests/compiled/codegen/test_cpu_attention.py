"""Attention on a CPU: results and gradients against float64, as near as ATen's, in ATen's layout."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.lib import compiling
from zerofx.codegen.cpu.extras import ATTENTION
from zerofx.ir import ops
from zerofx.ir.op_kernels import attention as facts
from zerofx.scheduler.cost.cpu.peaks import CpuPeak

aten = torch.ops.aten
pytestmark = compiling.regions
SPAN, KEYS, QUERIES = facts.SPAN, facts.KEYS, facts.QUERIES
# Samples, heads, queries, keys, dim: blocks that fit and blocks that do not, on every level.
SHAPES = [
    (2, 3, QUERIES, KEYS, 64),
    (1, 1, 1, 1, 1),
    (1, 2, 7, 5, 3),
    (2, 1, 77, 77, 80),
    (1, 2, SPAN + 9, KEYS + 70, 33),
    (1, 1, 2 * KEYS + 1, 2 * KEYS + 1, 128),
    (1, 2, 40, 3 * KEYS + 17, 24),
]


def inputs(shape: tuple[int, ...], spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, query, key and value, as views of one product, like a model's."""
    samples, heads, num_queries, num_keys, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def rows(num: int, scale: float = 1.0) -> Tensor:
        whole = torch.randn(samples, num, 3 * heads * dim, generator=generator) * scale
        return whole[..., heads * dim : 2 * heads * dim].view(samples, num, heads, dim).transpose(1, 2)

    return rows(num_queries), rows(num_queries, spread), rows(num_keys, spread), rows(num_keys)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [float((one.double() - other).abs().max()) for one, other in zip(found, exact, strict=True)]


def masks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Masks of each form that broadcasts to the scores, some with rows that hide all keys."""
    samples, heads, num_queries, num_keys, _ = shape
    generator = torch.Generator().manual_seed(1)
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    lengths = torch.randint(0, num_keys + 1, (samples, 1, 1, 1), generator=generator)
    biases = torch.randn(samples, heads, num_queries, num_keys, generator=generator)
    sparse = biases.masked_fill(torch.rand(biases.shape, generator=generator) < 0.5, -math.inf)
    sparse[..., num_queries // 2, :] = -math.inf

    def hide(hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)

    return {
        "causal": hide(key > query),
        "causal for each sample": hide(key > query).expand(samples, 1, -1, -1),
        "window": hide((key > query) | (key < query - KEYS - 3)),
        "padded behind": hide(key >= lengths),
        "padded in front": hide(key < lengths),
        "biases": biases,
        "biases of heads": sparse[:1],
        "one for all heads": sparse[:, :1].expand(-1, heads, -1, -1),
        "columns": sparse.transpose(2, 3).contiguous().transpose(2, 3),
        "one for all keys": sparse[..., :1],
        "lowest": torch.zeros(num_queries, num_keys).masked_fill(key > query, torch.finfo(torch.float32).min),
    }


@pytest.mark.days(3)
@pytest.mark.parametrize("spread", [1.0, 8.0], ids=["flat", "steep"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_results_and_gradients_are_as_exact_as_atens(shape: tuple[int, ...], is_causal: bool, spread: float) -> None:
    check(inputs(shape, spread), None, is_causal)


@pytest.mark.parametrize("name", masks((1, 1, 1, 1, 1)))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_masked_results_and_gradients_are_as_exact_as_atens(shape: tuple[int, ...], name: str) -> None:
    mask = masks(shape)[name]
    for is_causal in (False, True):
        check(inputs(shape), mask, is_causal)


def check(given: tuple[Tensor, Tensor, Tensor, Tensor], mask: Tensor | None, is_causal: bool) -> None:
    """The kernel against the same in float64, to within what ATen's kernel errs by, and laid out as by ATen."""
    grad, query, key, value = given
    assert facts.has_kernel(query, key, value, mask, 0.0)
    exact = both([one.double() for one in given], None if mask is None else mask.double(), is_causal)
    theirs = both(list(given), mask, is_causal)
    results = ops.attention(query, key, value, mask, is_causal, None)
    ours = (*results, *ops.attention_backward(grad, query, key, value, *results, mask, is_causal, None))
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]

    torch.testing.assert_close(ours[1], theirs[1])
    scale = max(float(one.abs().max()) for one in (exact[0], *exact[2:]))
    ours, theirs, exact = ((one[0], *one[2:]) for one in (ours, theirs, exact))
    allowed = [4 * error + 2e-6 * scale for error in errors(theirs, exact)]
    assert all(e <= a for e, a in zip(errors(ours, exact), allowed, strict=True))


def both(given: list[Tensor], mask: Tensor | None, is_causal: bool) -> tuple[Tensor, ...]:
    """ATen's results and gradients."""
    grad, query, key, value = given
    results = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, attn_mask=mask)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *results, 0.0, is_causal, attn_mask=mask
    )
    return (*results, *grads)


def test_queries_that_see_nothing_have_zeros_and_give_no_gradients() -> None:
    grad, query, key, value = inputs((1, 2, 70, KEYS + 20, 16))
    mask = torch.zeros(70, KEYS + 20)
    mask[10:50] = -math.inf
    results = ops.attention(query, key, value, mask, False, None)
    grads = ops.attention_backward(grad, query, key, value, *results, mask, False, None)
    for one in (*results, grads[0]):
        assert not one[:, :, 10:50].any() and one[:, :, :10].all() and one[:, :, 50:].all()
    seen = [*range(10), *range(50, 70)]
    rest = [one[:, :, seen] for one in (grad, query)]
    alone = ops.attention(rest[1], key, value, None, False, None)
    others = ops.attention_backward(*rest, key, value, *alone, None, False, None)
    for one, other in zip(grads[1:], others[1:], strict=True):
        torch.testing.assert_close(one, other)


def test_a_mask_that_is_causal_changes_the_result_by_rounding_alone() -> None:
    grad, query, key, value = inputs((1, 2, 300, 300, 16))
    mask = torch.full((300, 300), -math.inf).triu(1)
    masked, causal = (ops.attention(query, key, value, *how, None) for how in ((mask, False), (None, True)))
    torch.testing.assert_close(masked, causal)
    gradients = [
        ops.attention_backward(grad, query, key, value, *results, *how, None)
        for results, how in ((masked, (mask, False)), (causal, (None, True)))
    ]
    torch.testing.assert_close(*gradients)


def test_a_scale_may_be_given() -> None:
    _, query, key, value = inputs((1, 2, 33, 33, 16))
    result, _ = ops.attention(query, key, value, None, False, 0.5)
    expected, _ = ops.attention(query * (0.5 * math.sqrt(16)), key, value, None, False, None)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", [None, "causal", "biases of heads"])
def test_bits_do_not_depend_on_the_number_of_threads(name: str | None) -> None:
    shape = (3, 2, 90, 90, 32)
    grad, query, key, value = inputs(shape)
    how = (None, True) if name is None else (masks(shape)[name], False)
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results = ops.attention(query, key, value, *how, None)
            found.append((*results, *ops.attention_backward(grad, query, key, value, *results, *how, None)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def test_bits_do_not_depend_on_what_else_is_in_the_batch() -> None:
    shape = (3, 4, 90, KEYS + 40, 32)
    given, mask = inputs(shape), masks(shape)["biases of heads"].expand(3, -1, -1, -1)
    results = ops.attention(*given[1:], mask, False, None)
    whole = (*results, *ops.attention_backward(*given, *results, mask, False, None))
    for sample in range(3):
        part, own = [one[sample : sample + 1] for one in given], mask[sample : sample + 1]
        results = ops.attention(*part[1:], own, False, None)
        alone = (*results, *ops.attention_backward(*part, *results, own, False, None))
        assert all(torch.equal(one[sample], other[0]) for one, other in zip(whole, alone, strict=True))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_masks_that_are_not_numbers_are_as_with_aten(wrong: float) -> None:
    given = inputs((1, 1, 8, 8, 4))
    mask = torch.zeros(8, 8)
    mask[2, 3] = wrong
    theirs = both(list(given), mask, False)
    results = ops.attention(*given[1:], mask, False, None)
    grads = ops.attention_backward(*given, *results, mask, False, None)
    for one, other in zip((results[0], *grads[:2]), (theirs[0], *theirs[2:4]), strict=True):
        assert one.isnan().any() and torch.equal(one.isnan(), other.isnan())


def test_what_is_not_finite_is_as_with_aten() -> None:
    grad, query, key, value = inputs((1, 1, 8, 8, 4))
    value = value.clone()
    value[0, 0, 2, 1] = float("nan")
    result, log_sums = ops.attention(query, key, value, None, True, None)
    theirs, _ = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    assert result[0, 0, 2:, 1].isnan().all() and torch.equal(result.isnan(), theirs.isnan())
    grads = ops.attention_backward(grad, query, key, value, result, log_sums, None, True, None)
    assert all(one.isnan().any() for one in grads[:2])


@pytest.mark.parametrize("name", [None, "causal", "biases"])
def test_scratch_is_what_is_counted(name: str | None) -> None:
    shape = (1, 2, 40, 40, 16)
    _, query, key, value = inputs(shape)
    mask = None if name is None else masks(shape)[name]
    ops.attention(query, key, value, mask, True, None)
    with CpuPeak() as peak:
        results = ops.attention(query, key, value, mask, True, None)
    scratch = torch.get_num_threads() * 4 * facts.forward_scratch_numel(16)
    scratch += 0 if mask is None else 4 * facts.mask_scratch_numel(mask, 40)
    outputs = sum(one.numel() * 4 for one in results)
    assert 0 <= peak.num_bytes - outputs - scratch <= 1024


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"mask": torch.zeros(8, 8)}, True),
        ({"mask": torch.zeros(1, 2, 1, 8)}, True),
        ({"mask": torch.zeros(8, 8).requires_grad_()}, False),
        ({"mask": torch.zeros(8, 8, dtype=torch.float64)}, False),
        ({"mask": torch.zeros(2, 8, 8)}, False),
        ({"dropout": 0.1}, False),
        ({"query": torch.zeros(1, 4, 8, 16)}, False),
        ({"query": torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)}, False),
        ({"query": torch.zeros(1, 2, 16, 8).transpose(2, 3)}, False),
        ({"value": torch.zeros(1, 2, 8, 12)}, False),
    ],
    ids=[
        "plain",
        "mask",
        "mask of heads",
        "mask with a gradient",
        "mask in doubles",
        "mask of three dimensions",
        "dropout",
        "fewer heads of keys",
        "half precision",
        "columns",
        "narrow values",
    ],
)
def test_what_has_no_kernel_is_left_to_aten(change: dict[str, Any], takes: bool) -> None:
    plain = torch.zeros(1, 2, 8, 16)
    given = {"query": plain, "key": plain, "value": plain, "mask": None, "dropout": 0.0, **change}
    assert facts.has_kernel(**given) == takes


def _attended(inputs: list[Any]) -> tuple[Tensor, ...]:
    grad, packed, *mask = inputs
    inputs.clear()
    query, key, value = (one.view(2, 10, 2, 16).transpose(1, 2) for one in packed.split(32, -1))
    how = {"attn_mask": torch.where(mask[0], 0.0, -math.inf)} if mask else {"is_causal": True}
    results = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, **how)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, query, key, value, results[0], results[1], 0.0, not mask, attn_mask=how.get("attn_mask")
    )
    return tuple(grads)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("kernels", [{ATTENTION}, set()], ids=["kernel", "ATen"])
def test_a_compiled_region_has_it_where_it_is_in_use(kernels: set[str], masked: bool) -> None:
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor.compile import compile_region
    from zerofx.codegen.inductor.memory_record import memory_record

    given = [torch.randn(2, 2, 10, 16), torch.randn(2, 10, 96)]
    if masked:
        given.append(torch.ones(2, 1, 10, 10, dtype=torch.bool).tril())
    with mock.patch.object(inductor, "memory_record", wraps=memory_record) as recorded:
        compiled = compile_region(_attended, given, "attended", frozenset(kernels))
    for one, other in zip(compiled.call(list(given)), _attended(list(given)), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    assert ("zerofx.attention_backward" in recorded.call_args.args[0]) == bool(kernels)
