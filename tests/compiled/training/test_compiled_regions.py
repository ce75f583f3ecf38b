"""Every compiled region of every model gives what its source gives on ATen's kernels, in what it returns and writes.

A region that reads a mask before it is drawn, or a gradient in other strides, need not show in a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lib import compiling
from tests.lib.models import CASES
from tests.lib.runs.training import train_compiled

pytestmark = [pytest.mark.slow, *compiling.trainings]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# What cancels out is rounding errors of what goes in: less than this part of that is not compared any finer.
CANCELLED = 1e-3


@pytest.mark.parametrize("name", sorted(CASES))
def test_compiled_regions_give_what_atens_kernels_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor import compile as inductor

    compared: list[str] = []
    different: list[str] = []
    compile_region = inductor.compile_region

    def beside_aten(
        function: Any, inputs: Sequence[Any], name: str, *rest: Any, **settings: Any
    ) -> inductor.CompiledRegion:
        compiled = compile_region(function, inputs, name, *rest, **settings)

        def call(given: list[Any]) -> tuple[torch.Tensor, ...]:
            compared.append(name)
            found, wrong = _compare(compiled.call, function, given)
            different.extend(f"{name}: {one}" for one in wrong)
            return found

        return replace(compiled, call=call)

    monkeypatch.setattr(inductor, "compile_region", beside_aten)
    train_compiled(CASES[name], 3, 2, backend="inductor")
    assert compared
    assert different == []


def _compare(
    compiled: Callable[..., tuple[torch.Tensor, ...]], function: Callable[..., Any], given: list[Any]
) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    """What ``compiled`` returns, and in what it differs from ``function`` on the same inputs and random state."""
    written, expected_written = list(given), [*map(_copy, given)]
    largest = max((_largest(one) for one in given if isinstance(one, torch.Tensor)), default=0.0)
    before = torch.get_rng_state()
    expected = function(list(expected_written))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    found = compiled(given)
    wrong = [] if torch.equal(after, torch.get_rng_state()) else ["the random state"]
    for label, ones, others in (("output", found, expected), ("input", written, expected_written)):
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            if isinstance(other, torch.Tensor) and not _are_close(one, other, CANCELLED * largest):
                wrong.append(f"{label} {place}, {other.dtype} {list(other.shape)}")
    return found, wrong


def _copy(value: Any) -> Any:
    """In the same strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def _largest(value: torch.Tensor) -> float:
    if not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _are_close(found: torch.Tensor, expected: torch.Tensor, least: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    tolerance = TOLERANCE[expected.dtype]
    bound = tolerance * max(_largest(expected), least)
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0.0, atol=bound, equal_nan=True)
