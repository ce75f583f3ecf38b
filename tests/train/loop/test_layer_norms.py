"""The norms of each layer's gradients, handed to loggers with a step's other numbers."""

from __future__ import annotations

from typing import Any

import pytest

import zerofx
from tests.lib.runs.layer_norms import unlike_eager_mode
from tests.lib.users import adamw, tiny
from zerofx import Precision, UsageError


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, {"max_grad_norm": 0.5}),
        pytest.param(0, {}, marks=pytest.mark.slow),
        pytest.param(3, {"tile": {"layers.0.mlp.up.weight": 4}}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": Precision(loss_scale=1024.0)}, marks=pytest.mark.slow),
        (0, {"precision": Precision(loss_scale=1024.0), "max_grad_norm": 0.5}),
    ],
    ids=str,
)
def test_norms_are_those_of_eager_mode(stage: int, options: dict[str, Any]) -> None:
    assert unlike_eager_mode("gpt", stage, **options) == []


def test_it_is_asked_for_by_a_flag() -> None:
    model = tiny()
    with pytest.raises(UsageError, match=r"expected grad_norms to be True or False, found 'layers'"):
        zerofx.compile(model, adamw(model), grad_norms="layers")  # type: ignore[arg-type]  # what is tested
