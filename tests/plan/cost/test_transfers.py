"""What collectives and copies between tiers send and take: the formulas against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import UsageError
from zerofx.scheduler.cost.machine import Efficiency, Machine
from zerofx.scheduler.cost.transfers import collective_seconds, copy_seconds, wire_bytes

H100 = Machine.named("h100-sxm")
PLAIN = dataclasses.replace(H100, efficiency=Efficiency(1.0, 1.0, 1.0))


def test_wire_bytes_are_exact_when_divisible() -> None:
    assert wire_bytes("all_gather", 1024, 4) == wire_bytes("reduce_scatter", 1024, 4) == 768
    assert wire_bytes("all_reduce", 1024, 4) == 1536
    assert wire_bytes("broadcast", 1024, 4) == 1024
    assert [wire_bytes(kind, 1024, 1) for kind in ("all_gather", "all_reduce", "broadcast")] == [0, 0, 0]
    assert wire_bytes("all_gather", 10, 4) == 8


@given(st.integers(0, 2**60), st.integers(1, 4096))
def test_an_all_reduce_sends_what_its_two_halves_send(num_bytes: int, world: int) -> None:
    halves = wire_bytes("reduce_scatter", num_bytes, world) + wire_bytes("all_gather", num_bytes, world)
    assert wire_bytes("all_reduce", num_bytes, world) == halves
    assert halves * world - 2 * num_bytes * (world - 1) in range(2 * world)


@given(st.integers(1, 2**40), st.integers(1, 2048))
def test_an_all_reduce_takes_as_long_as_its_two_halves(num_bytes: int, world: int) -> None:
    halves = sum(collective_seconds(kind, num_bytes, world, H100) for kind in ("reduce_scatter", "all_gather"))
    assert collective_seconds("all_reduce", num_bytes, world, H100) == pytest.approx(halves)


def test_ring_within_a_node_is_alpha_plus_beta() -> None:
    gib = 2**30
    link = PLAIN.intra_node
    expected = 7 * link.latency + gib * 7 / 8 / link.bandwidth
    assert collective_seconds("all_gather", gib, 8, PLAIN) == pytest.approx(expected)
    assert collective_seconds("all_gather", gib, 1, PLAIN) == 0.0


def test_a_group_that_spans_nodes_is_bound_by_the_network() -> None:
    gib = 2**30
    intra, inter = PLAIN.intra_node, PLAIN.inter_node
    # 16 ranks fill two nodes: eight network cards a node together, 14 hops inside and 1 between.
    latency = 14 * intra.latency + inter.latency
    expected = latency + gib * 15 / 16 / min(intra.bandwidth, 8 * inter.bandwidth)
    assert collective_seconds("reduce_scatter", gib, 16, PLAIN) == pytest.approx(expected)
    # One rank a node: nothing but the network.
    expected = 15 * inter.latency + gib * 15 / 16 / inter.bandwidth
    assert collective_seconds("reduce_scatter", gib, 16, PLAIN, ranks_on_node=1) == pytest.approx(expected)
    assert collective_seconds("all_gather", gib, 9, PLAIN) > collective_seconds("all_gather", gib, 8, PLAIN)


def test_copies_share_what_the_node_shares() -> None:
    gib = 2**30
    host = PLAIN.host
    assert copy_seconds(gib, "device", "host", PLAIN) == pytest.approx(
        host.to_host.latency + gib / host.to_host.bandwidth
    )
    # With a slow host memory the eight ranks divide it.
    slow = dataclasses.replace(PLAIN, host=dataclasses.replace(host, memory_bandwidth=80e9))
    assert copy_seconds(gib, "host", "device", slow) == pytest.approx(host.to_device.latency + gib / 10e9)
    nvme = PLAIN.nvme
    assert nvme is not None
    read = nvme.read.latency + gib / (nvme.read.bandwidth / 8)
    assert copy_seconds(gib, "nvme", "host", PLAIN) == pytest.approx(read)
    assert copy_seconds(gib, "nvme", "device", PLAIN) == pytest.approx(
        read + copy_seconds(gib, "host", "device", PLAIN)
    )
    assert copy_seconds(gib, "device", "device", PLAIN) == pytest.approx(
        PLAIN.device.launch_latency + 2 * gib / PLAIN.device.memory_bandwidth
    )
    with pytest.raises(UsageError, match="has no nvme"):
        copy_seconds(gib, "host", "nvme", dataclasses.replace(PLAIN, nvme=None))
