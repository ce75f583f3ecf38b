"""What escapes zerofx unmeant is an InternalError that says where; what others raise stays theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.passes.prefetch import Prefetch
from zerofx.passes.reduce import Reduce
from zerofx.runtime.executor import Runtime


def _step() -> zerofx.Step:
    model = nn.Linear(4, 1)
    return zerofx.compile(
        model, torch.optim.SGD(model.parameters()), loss_fn=lambda y: y.mean(), backend="eager", max_shapes=2
    )


def _broken(*_: Any, **__: Any) -> Any:
    nothing: dict[str, Any] = {}
    return nothing["gather_0"]


@pytest.mark.parametrize(("kind", "remedy"), [(Prefetch, "ZEROFX_DISABLE=prefetch, which"), (Reduce, "Please report")])
def test_a_pass_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, kind: type[Any], remedy: str) -> None:
    monkeypatch.setattr(kind, "run", _broken)
    with pytest.raises(
        zerofx.InternalError, match=f"run the pass {kind.name}.*KeyError: 'gather_0'.*{remedy}"
    ) as caught:
        _step()(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, KeyError) and "zerofx doctor" in str(caught.value)


def test_what_others_raise_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _step()
    monkeypatch.setattr(Runtime, "begin", _broken)  # of this file, which is none of zerofx's
    with pytest.raises(KeyError, match="gather_0"):
        step(torch.ones(2, 4))
    monkeypatch.setattr(Runtime, "begin", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(2, 4))


def test_a_defect_while_a_step_runs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _step()
    step.prepare(torch.ones(2, 4))
    monkeypatch.setattr(step._steps.taken, "runtime", None)
    with pytest.raises(zerofx.InternalError, match="a defect of zerofx: "):
        step(torch.ones(2, 4))


def test_an_error_of_the_loss_is_the_loss_own() -> None:
    def loss_fn(outputs: Tensor) -> Tensor:
        raise KeyError("labels")

    model = nn.Linear(4, 1)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn, backend="eager")
    with pytest.raises(
        zerofx.CaptureError, match=r"own code raises KeyError: 'labels'\n.*test_internal_errors"
    ) as caught:
        step(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, KeyError)
