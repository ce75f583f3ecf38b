"""Attention on a CPU: results and gradients against float64, as near as ATen's, in ATen's layout."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx import attention as facts
from zerofx import ops
from zerofx.codegen.kernels.table import ATTENTION
from zerofx.peaks import CpuPeak

aten = torch.ops.aten
pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Inductor uses what torch itself deprecates
]
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


@pytest.mark.parametrize("spread", [1.0, 8.0], ids=["flat", "steep"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_results_and_gradients_are_as_exact_as_atens(shape: tuple[int, ...], is_causal: bool, spread: float) -> None:
    grad, query, key, value = inputs(shape, spread)
    doubles = [one.double().detach().requires_grad_() for one in (query, key, value)]
    exact = F.scaled_dot_product_attention(doubles[0], doubles[1], doubles[2], is_causal=is_causal)
    exact_grads = torch.autograd.grad(exact, doubles, grad.double())
    exact = exact.detach()

    theirs = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    ours = ops.attention(query, key, value, is_causal, None)
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]
    torch.testing.assert_close(ours[1], theirs[1])
    their_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *theirs, 0.0, is_causal
    )
    our_grads = ops.attention_backward(grad, query, key, value, *ours, is_causal, None)
    assert [one.stride() for one in our_grads] == [one.stride() for one in their_grads]

    scale = max(float(one.abs().max()) for one in (exact, *exact_grads))
    allowed = [4 * error + 2e-6 * scale for error in errors((theirs[0], *their_grads), (exact, *exact_grads))]
    assert all(e <= a for e, a in zip(errors((ours[0], *our_grads), (exact, *exact_grads)), allowed, strict=True))


def test_a_scale_may_be_given() -> None:
    _, query, key, value = inputs((1, 2, 33, 33, 16))
    result, _ = ops.attention(query, key, value, False, 0.5)
    expected, _ = ops.attention(query * (0.5 * math.sqrt(16)), key, value, False, None)
    torch.testing.assert_close(result, expected)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    grad, query, key, value = inputs((3, 2, 90, 90, 32))
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results = ops.attention(query, key, value, True, None)
            found.append((*results, *ops.attention_backward(grad, query, key, value, *results, True, None)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def test_what_is_not_finite_is_as_with_aten() -> None:
    grad, query, key, value = inputs((1, 1, 8, 8, 4))
    value = value.clone()
    value[0, 0, 2, 1] = float("nan")
    result, log_sums = ops.attention(query, key, value, True, None)
    theirs, _ = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    assert result[0, 0, 2:, 1].isnan().all() and torch.equal(result.isnan(), theirs.isnan())
    grads = ops.attention_backward(grad, query, key, value, result, log_sums, True, None)
    assert all(one.isnan().any() for one in grads[:2])


def test_scratch_is_what_is_counted() -> None:
    _, query, key, value = inputs((1, 2, 40, 40, 16))
    ops.attention(query, key, value, True, None)
    with CpuPeak() as peak:
        results = ops.attention(query, key, value, True, None)
    scratch = torch.get_num_threads() * 4 * facts.forward_scratch_numel(16)
    outputs = sum(one.numel() * 4 for one in results)
    assert 0 <= peak.num_bytes - outputs - scratch <= 1024


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"mask": torch.zeros(8, 8)}, False),
        ({"dropout": 0.1}, False),
        ({"query": torch.zeros(1, 4, 8, 16)}, False),
        ({"query": torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)}, False),
        ({"query": torch.zeros(1, 2, 16, 8).transpose(2, 3)}, False),
        ({"value": torch.zeros(1, 2, 8, 12)}, False),
    ],
    ids=["plain", "mask", "dropout", "fewer heads of keys", "half precision", "columns", "narrow values"],
)
def test_what_has_no_kernel_is_left_to_aten(change: dict[str, Any], takes: bool) -> None:
    plain = torch.zeros(1, 2, 8, 16)
    given = {"query": plain, "key": plain, "value": plain, "mask": None, "dropout": 0.0, **change}
    assert facts.has_kernel(**given) == takes


def _attended(inputs: list[Any]) -> tuple[Tensor, ...]:
    grad, packed = inputs
    inputs.clear()
    query, key, value = (one.view(2, 10, 2, 16).transpose(1, 2) for one in packed.split(32, -1))
    results = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, True)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, query, key, value, results[0], results[1], 0.0, True
    )
    return tuple(grads)


@pytest.mark.parametrize("kernels", [{ATTENTION}, set()], ids=["kernel", "ATen"])
def test_a_compiled_region_has_it_where_it_is_in_use(kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen import record
    from zerofx.codegen.inductor import compile_region

    seen: list[str] = []

    def noted(code: str, *rest: Any) -> Any:
        seen.append(code)
        return record.memory_record(code, *rest)

    monkeypatch.setattr("zerofx.codegen.inductor.memory_record", noted)
    given = [torch.randn(2, 2, 10, 16), torch.randn(2, 10, 96)]
    compiled = compile_region(_attended, given, "attended", frozenset(kernels))
    for one, other in zip(compiled.call(list(given)), _attended(list(given)), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    assert ("zerofx.attention_backward" in seen[0]) == bool(kernels)
