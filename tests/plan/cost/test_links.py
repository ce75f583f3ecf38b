"""Links from what was measured: latency and bandwidth where both can be told, and machines that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.errors import PlanError
from zerofx.scheduler.cost.links import (
    MeasuredLink,
    Transfer,
    correct_machine,
    fit_link,
    fit_links,
    predict_link,
)
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.transfers import collective_seconds, copy_seconds, wire_bytes
from zerofx.scheduler.plan.mesh import Mesh

H100 = Machine.named("h100-sxm")
STREAMS = ("collective", "to_host", "to_device", "nvme_read", "nvme_write")
KIB = 1024


def samples(link: MeasuredLink, *sizes: int) -> list[tuple[int, float, int]]:
    return [(size, link.seconds(size), 3) for size in sizes]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    latency=st.floats(1e-7, 1.0),
    rate=st.floats(1e5, 1e12),
    sizes=st.lists(st.integers(1, 1 << 30), min_size=2, max_size=6, unique=True).filter(lambda s: max(s) >= 2 * min(s)),
)
def test_transfers_of_different_sizes_tell_latency_from_bandwidth(
    latency: float, rate: float, sizes: list[int]
) -> None:
    link = MeasuredLink(latency, 1 / rate)
    found = fit_link(samples(link, *sorted(sizes)), MeasuredLink(1.0, 1.0))
    assert all(found.seconds(size) == pytest.approx(link.seconds(size), rel=1e-3) for size in sizes)


def test_where_all_are_of_one_size_both_are_off_alike() -> None:
    predicted = MeasuredLink(2e-6, 1e-9)
    found = fit_link(samples(MeasuredLink(0.0, 5e-9), 1000, 1900), predicted)
    assert found.latency / predicted.latency == pytest.approx(found.seconds_per_byte / predicted.seconds_per_byte)
    assert found.seconds(1450) == pytest.approx(5e-9 * 1450, rel=0.1)


def test_neither_is_ever_negative() -> None:
    predicted = MeasuredLink(1e-6, 1e-9)
    falling = fit_link([(KIB, 2e-3, 1), (64 * KIB, 1e-3, 1)], predicted)
    assert falling.seconds_per_byte == predicted.seconds_per_byte and 1e-3 < falling.latency < 2e-3
    steep = fit_link([(KIB, 1e-6, 1), (64 * KIB, 1e-3, 1)], predicted)
    assert steep.latency == 0.0 and steep.seconds_per_byte > 0


def test_one_that_took_long_by_chance_counts_little() -> None:
    link = MeasuredLink(1e-4, 1e-9)
    made = [Transfer(size, link.seconds(size)) for size in (KIB, 1 << 20) for _ in range(5)]
    found = fit_links({"collective": [*made, Transfer(KIB, 5.0)]}, H100, Mesh(shard=8))
    assert found["collective"].latency == pytest.approx(link.latency)


def test_streams_without_transfers_or_a_link_are_left_out() -> None:
    machine = replace(H100, nvme=None)
    moved = [Transfer(100, 1.0)]
    assert fit_links({"collective": moved}, machine, Mesh()) == {}
    assert fit_links({"nvme_read": moved, "to_host": [], "compute": moved}, machine, Mesh(shard=8)) == {}
    assert list(fit_links({"to_host": moved, "collective": moved}, machine, Mesh(shard=8))) == [
        "collective",
        "to_host",
    ]


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_corrected_machine_predicts_what_was_measured_and_nothing_else_changes(stream: str, ranks: int) -> None:
    mesh = Mesh(shard=ranks)
    for factor in (1e-3, 0.4, 1.0, 30.0, 1e4):
        before = predict_link(stream, H100, mesh)
        assert before is not None
        wanted = MeasuredLink(before.latency * factor * 3, before.seconds_per_byte * factor)
        machine = correct_machine(H100, {stream: wanted}, mesh)
        found = predict_link(stream, machine, mesh)
        assert found is not None
        assert found.latency == pytest.approx(wanted.latency)
        assert found.seconds_per_byte == pytest.approx(wanted.seconds_per_byte)
        assert (machine.name, machine.device, machine.efficiency) == (H100.name, H100.device, H100.efficiency)
        # A copy that is faster than the host's memory corrects that, and with it what it limits.
        for other in STREAMS if machine.host.memory_bandwidth == H100.host.memory_bandwidth else ():
            if other != stream:
                assert predict_link(other, machine, Mesh(shard=ranks)) == predict_link(other, H100, Mesh(shard=ranks))


def test_what_the_model_of_a_machine_says_of_a_stream() -> None:
    found = predict_link("collective", H100, Mesh(shard=16))
    assert found is not None
    sent = wire_bytes("all_gather", 1 << 24, 16)
    assert found.seconds(sent) == pytest.approx(collective_seconds("all_gather", 1 << 24, 16, H100))
    copy = predict_link("nvme_read", H100, Mesh(shard=16))
    assert copy is not None and copy.seconds(1 << 20) == pytest.approx(copy_seconds(1 << 20, "nvme", "host", H100))


def test_a_machine_without_latency_gets_the_one_that_was_measured() -> None:
    link = Link(1e9, 0.0)
    machine = correct_machine(
        replace(H100, intra_node=link, inter_node=link), {"collective": MeasuredLink(0.3, 1e-9)}, Mesh(shard=4)
    )
    assert collective_seconds("all_gather", 0, 4, machine) == pytest.approx(0.3)


@pytest.mark.parametrize("streams", [("collective", "collective model"), ("collective model",), ("collective",)])
def test_links_of_a_mesh_are_corrected_by_where_its_collectives_go(streams: tuple[str, ...]) -> None:
    """Eight ranks of a node share a computation; shards lie on eight nodes."""
    mesh, factors = Mesh(shard=8, model=8), {"collective": 3.0, "collective model": 5.0}
    links = {}
    for stream in streams:
        before = predict_link(stream, H100, mesh)
        assert before is not None
        links[stream] = MeasuredLink(before.latency * factors[stream], before.seconds_per_byte * factors[stream])
    machine = correct_machine(H100, links, mesh)
    for stream in factors:
        # One that was not measured is off by as much as the other.
        wanted, before, after = (
            factors[stream if stream in streams else streams[0]],
            *(predict_link(stream, found, mesh) for found in (H100, machine)),
        )
        assert before is not None and after is not None
        assert after.latency == pytest.approx(before.latency * wanted)
        assert after.seconds_per_byte == pytest.approx(before.seconds_per_byte * wanted)


@pytest.mark.parametrize("wrong", [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_what_no_link_can_be_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(PlanError, match="finite and positive"):
        MeasuredLink(*wrong)
