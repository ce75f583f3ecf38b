"""Gradients of the step that ran last, by name."""

from __future__ import annotations

from typing import Any

import pytest

import zerofx
from tests.lib.runs.kept_gradients import unlike_eager_mode
from tests.lib.users import adamw, ids, tiny
from zerofx import Precision, UsageError


@pytest.mark.parametrize(
    ("stage", "bound", "options"),
    [
        (3, 0.0, {"max_grad_norm": 0.5, "grad_norms": True}),
        (2, 0.0, {"precision": Precision(loss_scale=1024.0)}),
        pytest.param(0, 1e-6, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(3, 1e-6, {"tile": {"layers.0.mlp.up.weight": 4}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_eager_mode(stage: int, bound: float, options: dict[str, Any]) -> None:
    assert unlike_eager_mode("gpt", stage, bound, **options) == []


def test_a_star_keeps_those_of_all() -> None:
    model = tiny()
    step = zerofx.compile(model, adamw(model), keep_gradients="*", backend="eager")
    step(ids(), ids(1))
    for name, parameter in tiny().named_parameters():
        with step.full(name, "grad") as gradient:
            assert gradient.shape == parameter.shape and gradient.isfinite().all()


def test_one_is_kept_until_the_next_step_and_not_written() -> None:
    model = tiny()
    name = next(path for path, _ in model.named_parameters())
    batch = (ids(), ids(1))
    step = zerofx.compile(model, adamw(model), keep_gradients=(name,), backend="eager")
    step.prepare(*batch)
    with pytest.raises(UsageError, match="that the step that ran last has kept"), step.full(name, "grad"):
        pass
    step(*batch)
    with step.full(name, "grad") as gradient:
        assert gradient.count_nonzero()
    with pytest.raises(UsageError, match="to be read, found write_back=True"):
        step.full(name, "grad", write_back=True).__enter__()
    unkept = zerofx.compile(other := tiny(), adamw(other), backend="eager")
    unkept(*batch)
    with pytest.raises(UsageError, match="keep_gradients="), unkept.full(name, "grad"):
        pass


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("layers.0.wieght",), "found 'layers.0.wieght', which is none of"),
        (
            "layers.0.weight",
            r"found 'layers.0.weight' \(give keep_gradients=\('layers.0.weight',\)\): names of",
        ),
        ((0,), r"found \(0,\): names of"),
    ],
)
def test_names_of_what_is_not_trained_are_refused(asked: Any, message: str) -> None:
    model = tiny()
    with pytest.raises(UsageError, match=rf"expected keep_gradients to .*{message}"):
        zerofx.compile(model, adamw(model), keep_gradients=asked)
