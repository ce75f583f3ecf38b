"""What is noted of the code that runs while a forward is traced, and what of it a step compares."""

from __future__ import annotations

import linecache
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.capture.python_state.executed import ExecutedCode, pause_recording
from zerofx.capture.python_state.undo import WritesError, raise_before_writing
from zerofx.capture.python_state.walk import walk as walk_through
from zerofx.torch_private.dispatch import TorchDispatchMode


def double(x: Tensor) -> Tensor:
    return x * 2


class Noting(TorchDispatchMode):
    """Notes what traces the code that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.traced_by: list[Any] = []

    @pause_recording
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.traced_by.append(sys.gettrace())
        if func is torch.ops.aten.neg.default:
            raise ValueError("refused")
        return func(*args, **(kwargs or {}))


def test_code_of_the_users_is_noted_and_what_runs_under_an_operator_is_not_traced() -> None:
    executed, outer = ExecutedCode(), sys.gettrace()
    with Noting() as noting:
        with executed:
            with pytest.raises(ValueError, match="refused"):
                torch.neg(torch.ones(2))
            double(torch.ones(2))
        assert double.__code__ in executed.globals
        double(torch.ones(2))
    assert noting.traced_by
    assert all(trace is outer for trace in noting.traced_by)
    assert sys.gettrace() is outer


@pytest.mark.captures
def test_a_hook_on_another_tensor_does_not_walk_through_python_state() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), 0, loss_fn=lambda outputs: outputs.mean(), backend="eager"
    )
    step(torch.ones(2, 3))
    other = torch.ones(2, requires_grad=True)
    with mock.patch("zerofx.capture.python_state.watch.walk", wraps=walk_through) as walk:
        for _ in range(3):
            other.register_hook(lambda gradient: gradient)
            step(torch.ones(2, 3))
        assert walk.call_count == 0
        model[1].register_forward_hook(lambda module, args, output: 2 * output)
        assert step(torch.ones(2, 3)).item() == model(torch.ones(2, 3)).mean().item()
        assert walk.call_count
    step.close()


def test_lines_of_code_are_read_where_files_may_not_be_opened() -> None:
    linecache.clearcache()
    sys.setprofile(partial(raise_before_writing, readers=()))
    try:
        line = linecache.getline(__file__, 1)  # as a warning does
        with pytest.raises(WritesError):
            open(__file__)  # noqa: SIM115  # which it does not
    finally:
        sys.setprofile(None)
    assert line
