"""Stand-ins for numbers: what is computed with them has the bits of what is computed with the numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zerofx.capture.python_state.numbers import Number, NumberInputs, Tape, is_number

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "n * x": lambda x, n: n * x,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / x,
    "torch.mul": torch.mul,
    "torch.sub": torch.sub,
    "x ** n": lambda x, n: x**n,
    "torch.clamp": lambda x, n: torch.clamp(x, max=n),
}


def _stand_in(value: float) -> tuple[Tape, Any, dict[str, Any]]:
    source, tape = {"value": value}, Tape()
    return tape, Number(tape, "source", lambda: source["value"]), source


@pytest.mark.parametrize("value", [0.1, 3, -1e-3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("operator", _OPERATORS)
def test_tensors_have_the_bits_of_eager_mode(operator: str, dtype: torch.dtype, value: float) -> None:
    apply = _OPERATORS[operator]
    for shape in ((), (7,), (33, 5)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
        own, other = (values.to(dtype).requires_grad_(dtype.is_floating_point) for _ in range(2))
        tape, number, source = _stand_in(0.7 if isinstance(value, float) else 2)
        with NumberInputs():
            apply(own.detach(), number)  # what is a number now is another one when it runs
            source["value"] = value
            tape.assumptions.clear()
            for entry in tape.inputs.values():
                entry.fill()
            outcome = apply(own, number)
        expected = apply(other, value)
        assert outcome.dtype == expected.dtype
        assert torch.equal(outcome.isnan(), expected.isnan())
        assert torch.equal(outcome.nan_to_num(), expected.nan_to_num())
        if expected.requires_grad:
            weights = torch.linspace(0.5, 1.5, max(expected.numel(), 1)).reshape(expected.shape).to(expected.dtype)
            (outcome * weights).sum().backward()
            (expected * weights).sum().backward()
            assert own.grad is not None and other.grad is not None
            assert torch.equal(own.grad.nan_to_num(), other.grad.nan_to_num())


def test_python_computes_with_the_number_of_each_step() -> None:
    tape, step, source = _stand_in(10)
    beta = min(1.0, step / 1000) * np.float64(0.5) + round(abs(-step) % 7.5, 1) - np.sqrt(step)
    assert is_number(beta)
    assert all(assumption.holds() for assumption in tape.assumptions.values())
    source["value"] = 24
    assert beta.current() == min(1.0, 24 / 1000) * 0.5 + round(24 % 7.5, 1) - np.sqrt(24)
    assert all(assumption.holds() for assumption in tape.assumptions.values())
    source["value"] = 2000
    assert [str(a) for a in tape.assumptions.values() if not a.holds()] == ["lt(truediv(source, 1000), 1.0) == True"]


@pytest.mark.parametrize(
    "use", [math.cos, float, str, hash, repr, complex, lambda n: f"{n:.2f}", lambda n: [0, 1, 2][int(n)], bool]
)
def test_what_reads_a_number_is_an_assumption(use: Callable[[Any], Any]) -> None:
    tape, number, source = _stand_in(1.5)
    assert use(number) == use(1.5)
    source["value"] = 0.0
    assert any(not assumption.holds() for assumption in tape.assumptions.values())


def test_a_number_is_one_for_who_asks() -> None:
    _, number, _ = _stand_in(1.5)
    assert isinstance(number, float)
    assert not isinstance(number, int)
    assert copy.deepcopy(number) is number


def test_an_input_is_filled_for_each_step() -> None:
    tape, number, source = _stand_in(0.5)
    with NumberInputs():
        outcome: Tensor = torch.tensor(number) + torch.ones(3) * (number * 2)
    assert outcome.tolist() == [0.0, 0.0, 0.0]
    source["value"] = 0.25
    assert [entry.fill().item() for entry in tape.inputs.values()] == [0.25, 0.5]
