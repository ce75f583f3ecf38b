"""The machine that a step is planned for where none is named."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.devices import products_in_tf32
from zerofx.driver import asked
from zerofx.options import check_options
from zerofx.scheduler.cost.machine import Machine

ROW = Machine.named("h100-sxm").host.memory_bytes


def at_hand(monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int = 1) -> Machine:
    control: Any = SimpleNamespace(share=lambda what, ask: ask(), num_ranks=num_ranks)
    properties = SimpleNamespace(name=name, total_memory=79 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return asked.machine_at_hand(torch.device("cuda", 0), check_options(stage=3), control)


@pytest.mark.parametrize("host_bytes", [128 << 30, 2 * ROW])
@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "Another GPU"])
def test_a_gpu_of_a_server_has_no_more_host_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch, name: str, host_bytes: int
) -> None:
    monkeypatch.setattr(asked, "memory_bytes", lambda: host_bytes)
    unknown: AbstractContextManager[object] = (
        pytest.warns(UserWarning, match="no machine row") if name == "Another GPU" else nullcontext()
    )
    with unknown:
        machine = at_hand(monkeypatch, name)
    assert machine.host.memory_bytes == min(host_bytes, ROW)


def test_float32_runs_on_tf32_where_the_program_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not at_hand(monkeypatch, "NVIDIA H100").allows_tf32
    with products_in_tf32():
        assert at_hand(monkeypatch, "NVIDIA H100").allows_tf32


@pytest.mark.parametrize("num_threads", [1, 4, 1000])
def test_updates_on_the_host_take_as_long_as_the_threads_of_each_rank_need(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    num_bytes, host = 1e9, Machine.named("h100-sxm").host
    alone, of_eight = at_hand(monkeypatch, "NVIDIA H100"), at_hand(monkeypatch, "NVIDIA H100", 8)
    assert host.update is not None and alone.host.memory_bandwidth == host.memory_bandwidth
    update = host.update.scale_to_threads(num_threads)
    assert alone.host.update == of_eight.host.update == update
    assert num_bytes / alone.host_seconds(0, num_bytes) == pytest.approx(update.bandwidth)
    share = host.memory_bandwidth * alone.efficiency.memory / 8
    assert num_bytes / of_eight.host_seconds(0, num_bytes) == pytest.approx(min(update.bandwidth, share))
