"""Machines as data, and the calibration of the machine at hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import UsageError
from zerofx.scheduler.cost import probe
from zerofx.scheduler.cost.catalog import list_machines, machine_of_device
from zerofx.scheduler.cost.machine import Device, Efficiency, Host, HostUpdate, Link, Machine, Nvme, Peaks
from zerofx.scheduler.cost.probe import read_kept_machine
from zerofx.scheduler.cost.transfers import collective_seconds, copy_seconds

rates = st.floats(1e3, 1e18)
latencies = st.floats(0, 1)
sizes = st.integers(1, 2**50)
links = st.builds(Link, rates, latencies)
fractions = st.floats(0.01, 1.0)
optional_rates = st.none() | rates
machines = st.builds(
    Machine,
    name=st.text(min_size=1),
    source=st.text(),
    device=st.builds(
        Device,
        st.builds(Peaks, rates, optional_rates, optional_rates, optional_rates, optional_rates),
        rates,
        sizes,
        latencies,
    ),
    efficiency=st.builds(Efficiency, fractions, fractions, fractions, fractions),
    intra_node=links,
    inter_node=links,
    ranks_per_node=st.integers(1, 72),
    host=st.builds(Host, sizes, rates, rates, links, links),
    nvme=st.none() | st.builds(Nvme, sizes, links, links),
)

H100 = Machine.named("h100-sxm")
PLAIN = dataclasses.replace(H100, efficiency=Efficiency(1.0, 1.0, 1.0))


@given(machines)
def test_json_round_trip(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("machine", list_machines(), ids=lambda m: m.name)
def test_built_in_rows(machine: Machine) -> None:
    assert Machine.named(machine.name) == machine == Machine.from_json(machine.to_json())
    assert machine.source
    assert hash(machine) == hash(Machine.named(machine.name))
    peak = machine.device.peak
    ladder = [peak.float32, peak.tf32, peak.float16, peak.fp8]
    known = [rate for rate in ladder if rate is not None]
    assert known == sorted(known), "narrower types are at least as fast"
    assert machine.intra_node.bandwidth >= machine.inter_node.bandwidth


def test_every_requested_row_exists() -> None:
    names = [machine.name for machine in list_machines()]
    expected = "v100-32 a100-40 a100-80 h100-pcie h100-sxm h200 b200 l4 rtx-4090 mi300x cpu"
    assert names == expected.split()


def test_names_are_forgiving_and_errors_list_the_nearest() -> None:
    assert Machine.named("H100 SXM") == Machine.named("h100_sxm") == H100
    with pytest.raises(UsageError, match=r"'h100-sx5'.*did you mean 'h100-sxm'.*Known: v100-32.*cpu"):
        Machine.named("h100-sx5")


@pytest.mark.parametrize(
    ("driver_name", "num_bytes", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 80 * 2**30, "h100-sxm"),
        ("NVIDIA H100 PCIe", 80 * 2**30, "h100-pcie"),
        ("NVIDIA H200", 140 * 2**30, "h200"),
        ("NVIDIA A100-SXM4-40GB", 40 * 2**30, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80 * 2**30, "a100-80"),
        ("Tesla V100-SXM2-32GB", 32 * 2**30, "v100-32"),
        ("NVIDIA L4", 23 * 2**30, "l4"),
        ("NVIDIA GeForce RTX 4090", 24 * 2**30, "rtx-4090"),
        ("AMD Instinct MI300X", 192 * 2**30, "mi300x"),
        ("NVIDIA L40S", 48 * 2**30, None),
        ("NVIDIA GH200 480GB", 96 * 2**30, None),
    ],
)
def test_rows_by_driver_name(driver_name: str, num_bytes: int, expected: str | None) -> None:
    row = machine_of_device(driver_name, num_bytes)
    assert (row and row.name) == expected


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("device.memory_bytes", 1.5, "machine.device.memory_bytes: expected int, found 1.5"),
        ("device.peak", 3, "machine.device.peak: expected an object with the fields of Peaks"),
        ("device.peak.fp8", "fast", "machine.device.peak.fp8: expected float"),
        ("intra_node.bandwidth", -1.0, "Link.bandwidth must be positive"),
        ("efficiency.matmul", 1.5, "Efficiency.matmul must be a fraction"),
        ("ranks_per_node", True, "machine.ranks_per_node: expected int, found True"),
        ("host.color", 1, "machine.host: unknown field 'color'"),
        ("name", "", "Machine.name must not be empty"),
    ],
)
def test_from_json_names_the_field_that_is_wrong(path: str, value: object, message: str) -> None:
    data = json.loads(H100.to_json())
    *parents, leaf = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    target[leaf] = value
    with pytest.raises(UsageError) as caught:
        Machine.from_json(json.dumps(data))
    assert message in str(caught.value)


def test_from_json_refuses_missing_fields_and_other_text() -> None:
    data = json.loads(H100.to_json())
    del data["host"]["flops"]
    with pytest.raises(UsageError, match=r"machine.host: missing field 'flops'"):
        Machine.from_json(json.dumps(data))
    with pytest.raises(UsageError, match="not valid JSON"):
        Machine.from_json("{")


def test_rates_by_dtype() -> None:
    peak = PLAIN.device.peak
    assert PLAIN.matmul_flops(torch.bfloat16) == peak.bfloat16
    assert PLAIN.matmul_flops(torch.float32) == peak.float32
    assert dataclasses.replace(PLAIN, allows_tf32=True).matmul_flops(torch.float32) == peak.tf32
    assert PLAIN.matmul_flops(torch.float8_e4m3fn) == peak.fp8
    assert PLAIN.matmul_flops(torch.float64) == peak.float32 / 2
    slow = dataclasses.replace(PLAIN, efficiency=Efficiency(0.5, 1.0, 1.0, convolution=0.8))
    assert PLAIN.convolution_flops(torch.bfloat16) == peak.bfloat16
    assert slow.convolution_flops(torch.bfloat16) == 0.8 * slow.matmul_flops(torch.bfloat16)
    v100 = Machine.named("v100-32")
    assert v100.matmul_flops(torch.bfloat16) == v100.matmul_flops(torch.float32)
    assert v100.matmul_flops(torch.float8_e5m2) == v100.matmul_flops(torch.float16)


def test_host_work_is_a_roofline_on_the_ranks_share() -> None:
    assert PLAIN.host_seconds(0, 2**30) == pytest.approx(2**30 / (PLAIN.host.memory_bandwidth / 8))
    assert PLAIN.host_seconds(1e12, 0) == pytest.approx(1e12 / (PLAIN.host.flops / 8))
    assert PLAIN.host_bytes_per_rank * 8 == PLAIN.host.memory_bytes


@given(machine=machines, num_ranks=st.integers(1, 100))
def test_ranks_of_a_node_are_at_most_those_there_are(machine: Machine, num_ranks: int) -> None:
    shared = machine.for_ranks(num_ranks)
    sharers = min(num_ranks, machine.ranks_per_node)
    assert shared.host_bytes_per_rank == machine.host.memory_bytes // sharers
    assert shared.nvme_bytes_per_rank == (machine.nvme.num_bytes // sharers if machine.nvme is not None else 0)
    assert shared.host_seconds(1e12, 0) <= machine.host_seconds(1e12, 0)
    assert dataclasses.replace(shared, ranks_per_node=machine.ranks_per_node) == machine


def test_a_rank_alone_has_the_whole_of_its_node() -> None:
    v100, size = Machine.named("v100-32"), 2**30
    alone = v100.for_ranks(1)
    assert v100.nvme is not None
    assert copy_seconds(size, "nvme", "host", alone) == pytest.approx(100e-6 + size / v100.nvme.read.bandwidth)
    assert copy_seconds(size, "host", "host", alone) == pytest.approx(copy_seconds(size, "host", "host", v100) / 8)
    assert collective_seconds("all_gather", size, 4, v100.for_ranks(4)) == collective_seconds(
        "all_gather", size, 4, v100
    )
    assert v100.for_ranks(8) == v100.for_ranks(64) == v100


def test_measuring_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "cache"))
    (drive := tmp_path / "drive").mkdir()
    start = time.perf_counter()
    machine = Machine.measure("cpu", nvme_path=str(drive))
    # Two seconds on two idle cores; the limit leaves room for a busy machine.
    assert time.perf_counter() - start < 20
    assert Machine.from_json(machine.to_json()) == machine
    assert 1e9 < machine.device.peak.float32 < 1e14
    assert 1e8 < machine.device.memory_bandwidth < 1e13
    assert 1e-8 < machine.device.launch_latency < 1e-2
    assert 1e-2 < machine.efficiency.convolution <= 1
    assert machine.nvme is not None
    assert "measured" in machine.source
    assert machine.host.update is not None and machine.host.update.num_threads == torch.get_num_threads()
    assert not list(drive.iterdir())
    cpu = torch.device("cpu")
    assert read_kept_machine(cpu, 1) == machine and read_kept_machine(cpu, 2) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert read_kept_machine(cpu, 1) is None


def test_messages_of_a_gpu_take_its_time_and_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # of the device, in ms

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def send() -> None:
        clock[0] += 0.005
        time.sleep(0.001)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(probe, "_MATMUL_CUDA", 8)
    assert probe._device_seconds(torch.device("cpu"), send) == pytest.approx(5e-6)


def test_measuring_leaves_the_generator_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    before = torch.get_rng_state()
    Machine.measure("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_measuring_refuses_what_it_cannot() -> None:
    with pytest.raises(UsageError, match="can measure cpu and cuda"):
        Machine.measure("meta")


def _measure_on_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    Path(folder, f"{rank}.json").write_text(Machine.measure("cpu").to_json())
    dist.destroy_process_group()


@pytest.mark.days(3)
def test_ranks_measure_together_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "cache"))
    mp.spawn(_measure_on_rank, args=(2, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]  # torch's
    texts = [(tmp_path / f"{rank}.json").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    machine = Machine.from_json(texts[0])
    assert read_kept_machine(torch.device("cpu"), 2) == machine
    assert machine.ranks_per_node == 2
    assert machine.intra_node != Machine.named("cpu").intra_node
    assert 1e7 < machine.intra_node.bandwidth < 1e12
    assert machine.intra_node.latency < 0.1


def test_no_built_in_host_updates_at_its_datasheets_bandwidth() -> None:
    for machine in list_machines():
        if machine.is_cpu:
            continue
        host, alone = machine.host, machine.for_ranks(1)
        assert host.update is not None and host.update.num_threads == 16, machine.name
        assert alone.host_seconds(0, 1e9) == pytest.approx(1e9 / host.update.bandwidth), machine.name
        assert host.update.bandwidth < 0.15 * host.memory_bandwidth, machine.name
    seen = Machine.named("h100-sxm").host.update
    assert seen is not None and 73e9 < seen.bandwidth < 93e9


def test_threads_of_an_update_add_up_until_memory_has_no_more() -> None:
    update = Machine.named("h100-sxm").host.update
    assert update is not None
    rates = [update.scale_to_threads(number).bandwidth for number in (1, 2, 4, 8, 16, 32, 1000)]
    assert rates == sorted(rates) and rates[4] == pytest.approx(update.bandwidth)
    assert 0.9 * update.thread_bandwidth < rates[0] < update.thread_bandwidth
    gains = [after / before for before, after in itertools.pairwise(rates[:6])]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.8 and gains[-1] < 1.3
    assert rates[-1] < 2 * update.bandwidth
    assert HostUpdate(4, 40e9, 10e9).scale_to_threads(8).bandwidth == pytest.approx(80e9)


def test_threads_of_an_update_are_fitted_to_what_they_do() -> None:
    exact = HostUpdate(16, 85e9, 10e9)
    rates = {number: exact.scale_to_threads(number).bandwidth for number in (1, 2, 4, 8, 16)}
    assert dataclasses.astuple(HostUpdate.fit(rates)) == pytest.approx(dataclasses.astuple(exact))
    noise = (1.05, 0.96, 1.03, 0.97, 1.0)
    noisy = HostUpdate.fit({number: rate * factor for (number, rate), factor in zip(rates.items(), noise, strict=True)})
    assert noisy.bandwidth == 85e9
    for number, rate in rates.items():
        assert noisy.scale_to_threads(number).bandwidth == pytest.approx(rate, rel=0.05)
    # Where one thread has all that memory gives, more of them get no more.
    full = HostUpdate.fit({1: 20e9, 2: 19e9})
    assert [full.scale_to_threads(number).bandwidth for number in (1, 2, 8)] == pytest.approx([19e9] * 3, rel=0.01)
    assert HostUpdate.fit({1: 9e9}) == HostUpdate(1, 9e9, 9e9)


def test_a_machine_from_before_updates_were_measured_can_be_read() -> None:
    machine = Machine.named("h100-sxm")
    data = json.loads(machine.to_json())
    del data["host"]["update"]
    older = Machine.from_json(json.dumps(data))
    assert older == dataclasses.replace(machine, host=dataclasses.replace(machine.host, update=None))
    share = machine.host.memory_bandwidth * machine.efficiency.memory / machine.ranks_per_node
    assert older.host_seconds(0, 1e9) == pytest.approx(1e9 / share)
