"""The norms of each layer's gradients, handed to loggers with a step's other numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.runs.layer_norms import unlike_eager_mode
from zerofx import Precision


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
