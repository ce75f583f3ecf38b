"""Which device is the current one while a step is built and runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.codegen.kernels.current_device import device_guard
from zerofx.session import life


def test_a_cpu_has_no_current_device() -> None:
    with device_guard(torch.device("cpu")):
        assert torch.ones(1, device=torch.device("cpu")).device.type == "cpu"


def test_a_step_is_built_and_runs_with_its_own_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    def noted(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(life, "device_guard", noted)
    model = nn.Linear(2, 1)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters()), 0, loss_fn=lambda y, x: y.sum(), backend="eager",
        example_batch=(torch.ones(1, 2),),
    )  # fmt: skip
    assert entered == [torch.device("cpu")]
    step(torch.ones(1, 2))
    assert entered == 2 * [torch.device("cpu")]
