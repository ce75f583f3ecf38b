"""The machine that a step is planned for where none is named."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerofx.driver import asked
from zerofx.options import check_options
from zerofx.scheduler.cost.machine import Machine

CONTROL: Any = SimpleNamespace(share=lambda what, ask: ask(), num_ranks=1)
ROW = Machine.named("h100-sxm").host.memory_bytes


@pytest.mark.parametrize("host_bytes", [128 << 30, 2 * ROW])
@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "Another GPU"])
def test_a_gpu_of_a_server_has_no_more_host_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch, name: str, host_bytes: int
) -> None:
    properties = SimpleNamespace(name=name, total_memory=79 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(asked, "memory_bytes", lambda: host_bytes)
    unknown: AbstractContextManager[object] = (
        pytest.warns(UserWarning, match="no machine row") if name == "Another GPU" else nullcontext()
    )
    with unknown:
        machine = asked.machine_at_hand(torch.device("cuda", 0), check_options(stage=3), CONTROL)
    assert machine.host.memory_bytes == min(host_bytes, ROW)
