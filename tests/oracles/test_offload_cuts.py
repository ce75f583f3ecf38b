"""Cuts of the data-flow graph are those of ZeRO-Offload, and the host is used only where the device is too small."""

from __future__ import annotations

import dataclasses

import pytest

from tests.oracles.offload_cuts import best_cuts, cuts, place
from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.scheduler.cost.machine import Machine

STATES = frozenset({"master", "momentum", "variance", "update", "cast"})
_ROW = Machine.named("v100-32")
# The paper's updates have all threads of the host for one device.
V100 = dataclasses.replace(_ROW, host=dataclasses.replace(_ROW.host, update=None))
BILLION = 10**9

# The paper's table 1: what is on the host; bytes per parameter on the device and on the link.
STRATEGIES = [
    (frozenset(), 16, 0),
    (frozenset({"gradients"}), 14, 4),
    (STATES, 4, 4),
    (STATES | {"gradients"}, 2, 4),
]


@pytest.mark.parametrize(("on_host", "device_bytes", "link_bytes"), STRATEGIES)
def test_the_strategies_of_the_paper(on_host: frozenset[str], device_bytes: int, link_bytes: int) -> None:
    (cut,) = [cut for cut in cuts() if cut.on_host == on_host]
    assert (cut.device_bytes, cut.link_bytes) == (device_bytes, link_bytes)


def test_no_offload_moves_less_than_4_bytes_a_parameter_nor_keeps_less_than_2_at_that() -> None:
    assert len(cuts()) == 2**7
    moving = [cut for cut in cuts() if cut.link_bytes > 0]
    assert all(cut.device_bytes == 16 for cut in cuts() if cut.link_bytes == 0)
    assert min(cut.link_bytes for cut in moving) == 4
    assert min(cut.device_bytes for cut in moving if cut.link_bytes == 4) == 2
    (chosen,) = [cut for cut in moving if (cut.device_bytes, cut.link_bytes) == (2, 4)]
    assert chosen.on_host == STATES | {"gradients"}
    assert (chosen.down_bytes, chosen.up_bytes) == (2, 2)


def test_the_cuts_worth_having() -> None:
    """The last also streams the parameters in, once for forward and once for backward."""
    assert [(cut.device_bytes, cut.link_bytes) for cut in best_cuts()] == [(16, 0), (2, 4), (0, 6)]


@pytest.mark.parametrize(("billions", "offloads"), [(1.4, False), (2.0, False), (2.5, True), (10, True), (13, True)])
def test_one_32_gb_device_trains_13_billion_parameters_with_its_host(billions: float, offloads: bool) -> None:
    """The paper: 13 billion, and 1.4 billion without (activations and buffers take the rest there)."""
    placement = place(round(billions * BILLION), 1, V100)
    assert bool(placement.cut.on_host) is offloads
    assert placement.device_bytes <= V100.device.memory_bytes
    if offloads:
        assert "update" in placement.cut.on_host


def test_what_does_not_fit_is_refused_with_the_least() -> None:
    with pytest.raises(MemoryBudgetError, match=r"the least on a device is 37.3 GiB of 32.0 GiB"):
        place(20 * BILLION, 1, V100)
    with pytest.raises(UsageError, match="expected parameters and ranks"):
        place(0, 1, V100)


def test_with_enough_ranks_nothing_is_offloaded() -> None:
    """Ten billion parameters with 10 GiB of activations: the host serves up to 32 ranks, and none from 64 on."""
    ranks = (4, 8, 16, 32, 64, 128, 256)
    found = [place(10 * BILLION, n, V100, other_bytes=10 * 2**30) for n in ranks]
    assert [bool(p.cut.on_host) for p in found] == [True, True, True, True, False, False, False]
    seconds = [placement.update_seconds for placement in found]
    assert seconds == sorted(seconds, reverse=True)
    assert [p.host_bytes > 0 for p in found] == [bool(p.cut.on_host) for p in found]
