"""Built-in machines: datasheet rows, each in its usual node of 8 accelerators with the usual network.

Sources, by column:
- FLOP/s, memory: the vendor's datasheet named in the row, boost clock, **dense** rates (vendors print "with sparsity").
  Capacities are GiB: an "80 GB" part has 80 * 2**30 bytes, of which the driver keeps some hundred MiB.
- Links within a node: half the datasheet's bidirectional number. Hop latencies: NCCL's tuning model, ring algorithm
  with the Simple protocol (src/graph/tuning.cc, hwLat): NVLink 3.4, PCIe 5.7, network 9.6 microseconds.
- Network: the row's reference system; `inter_node` is one accelerator's share of the node's network.
- Updates on the host: what was seen of 16 threads a rank, not what the host's memory has on a datasheet.
- Host: the row's reference system; float32 FLOP/s = sockets x cores x base clock x 64 (two AVX-512 FMA units) or 32
  (two AVX2 FMA units).
"""

from __future__ import annotations

import difflib
import re

from zerofx.errors import UsageError
from zerofx.scheduler.cost.machine import Device, Efficiency, Host, HostUpdate, Link, Machine, Nvme, Peaks

_GIB = 2**30
_GBIT = 1e9 / 8  # bytes per second in one Gbit/s
_TERA = 1e12

# NCCL src/graph/tuning.cc, hwLat, ring, Simple; seconds a hop.
_NVLINK_HOP = 3.4e-6
_PCIE_HOP = 5.7e-6
_NETWORK_HOP = 9.6e-6

# PCI Express x16, one direction, after 128b/130b encoding (PCI-SIG): generations 3, 4, 5.
_PCIE3 = 15.75e9
_PCIE4 = 31.5e9
_PCIE5 = 63.0e9

_COPY_LATENCY = 10e-6  # cudaMemcpyAsync of few bytes, seconds; order of magnitude of NVIDIA's bandwidthTest
_DRIVE_LATENCY = 100e-6  # random read of a data-centre NVMe drive, seconds; typical, rounded
_LAUNCH = 4e-6  # seconds a kernel costs eager PyTorch when launches follow each other; order of magnitude

# Assumptions, not datasheet values. Links: NCCL caps an A100's ring at 235 of 300 GB/s (tuning.cc), 0.78. Memory:
# BabelStream reaches 0.85 to 0.92 of HBM peaks. Matmuls: large bf16 GEMMs reach 0.7 to 0.85, less where power limits.
_TYPICAL = Efficiency(matmul=0.75, memory=0.85, link=0.78)

# Of updates on the 16 vCPUs of a cloud's H100, whose whole host has 614.4 GB/s, 73 to 93 GB/s were seen. Other rows are
# taken to have as large a part of their hosts' memory; 13 GB/s is an assumption of what one thread gets.
_UPDATE_THREADS, _UPDATE_BANDWIDTH, _UPDATE_HOST, _THREAD_BANDWIDTH = 16, 85e9, 614.4e9, 13e9


def _update(host_bandwidth: float) -> HostUpdate:
    bandwidth = _UPDATE_BANDWIDTH * host_bandwidth / _UPDATE_HOST
    return HostUpdate(_UPDATE_THREADS, min(bandwidth, _UPDATE_THREADS * _THREAD_BANDWIDTH), _THREAD_BANDWIDTH)


def _drives(number: int, num_bytes: float = 3.84e12, read: float = 6.8e9, write: float = 4.0e9) -> Nvme:
    """A node's drives, of so many bytes each; by default those of DGX systems, of the fourth generation of PCIe."""
    paths = Link(number * read, _DRIVE_LATENCY), Link(number * write, _DRIVE_LATENCY)
    return Nvme(int(number * num_bytes), *paths)


def _gpu(
    name: str,
    source: str,
    peak: Peaks,
    capability: tuple[int, int] | None,
    *,
    memory_gib: int,
    memory_bandwidth: float,
    intra: Link,
    node_gbit: float,
    host_gib: int,
    host_bandwidth: float,
    host_flops: float,
    pcie: float,
    nvme: Nvme,
) -> Machine:
    """One row: 8 accelerators a node, `node_gbit` of network a node, drives and host memory as node totals."""
    return Machine(
        name=name,
        source=source,
        device=Device(peak, memory_bandwidth, memory_gib * _GIB, _LAUNCH, capability),
        efficiency=_TYPICAL,
        intra_node=intra,
        inter_node=Link(node_gbit * _GBIT / 8, _NETWORK_HOP),
        ranks_per_node=8,
        host=Host(
            host_gib * _GIB,
            host_bandwidth,
            host_flops,
            Link(pcie, _COPY_LATENCY),
            Link(pcie, _COPY_LATENCY),
            _update(host_bandwidth),
        ),
        nvme=nvme,
    )


def _a100(name: str, memory_gib: int, memory_bandwidth: float, host_gib: int, drives: int) -> Machine:
    return _gpu(
        name,
        "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gbit/s HDR, 2 x EPYC 7742, 8 x DDR4-3200 each, Gen4 drives",
        Peaks(19.5 * _TERA, 156 * _TERA, 312 * _TERA, 312 * _TERA),
        (8, 0),
        memory_gib=memory_gib,
        memory_bandwidth=memory_bandwidth,
        intra=Link(300e9, _NVLINK_HOP),
        node_gbit=1600,
        host_gib=host_gib,
        host_bandwidth=409.6e9,
        host_flops=2 * 64 * 2.25e9 * 32,
        pcie=_PCIE4,
        nvme=_drives(drives),
    )


def _hopper(name: str, source: str, memory_gib: int, memory_bandwidth: float) -> Machine:
    return _gpu(
        name,
        f"{source}; DGX H100/H200: 8 x 400 Gbit/s NDR, 2 x Xeon 8480C, 8 x DDR5-4800 a socket, 8 Gen4 drives",
        Peaks(66.9 * _TERA, 494.7 * _TERA, 989.4 * _TERA, 989.4 * _TERA, 1978.9 * _TERA),
        (9, 0),
        memory_gib=memory_gib,
        memory_bandwidth=memory_bandwidth,
        intra=Link(450e9, _NVLINK_HOP),
        node_gbit=3200,
        host_gib=2048,
        host_bandwidth=614.4e9,
        host_flops=2 * 56 * 2.0e9 * 64,
        pcie=_PCIE5,
        nvme=_drives(8),
    )


def list_machines() -> tuple[Machine, ...]:
    """All built-in machines, oldest first, the CPU last."""
    return (
        _gpu(
            "v100-32",
            "NVIDIA V100 datasheet (SXM2); AWS p3dn.24xlarge: 100 Gbit/s, 768 GiB, 48 Xeon 8175M cores, 2 x 900 GB",
            Peaks(15.7 * _TERA, float16=125 * _TERA),
            (7, 0),
            memory_gib=32,
            memory_bandwidth=900e9,
            intra=Link(150e9, _NVLINK_HOP),
            node_gbit=100,
            host_gib=768,
            host_bandwidth=256e9,  # 2 sockets x 6 x DDR4-2666
            host_flops=48 * 2.5e9 * 64,
            pcie=_PCIE3,
            nvme=_drives(2, 0.9e12, 3.0e9, 1.4e9),
        ),
        _a100("a100-40", 40, 1555e9, host_gib=1024, drives=4),
        _a100("a100-80", 80, 2039e9, host_gib=2048, drives=8),
        _gpu(
            "h100-pcie",
            "NVIDIA H100 PCIe datasheet; OVX-like server: 4 x 400 Gbit/s, PCIe between accelerators (no NVLink bridge)",
            Peaks(51.2 * _TERA, 378 * _TERA, 756 * _TERA, 756 * _TERA, 1513 * _TERA),
            (9, 0),
            memory_gib=80,
            memory_bandwidth=2000e9,
            intra=Link(_PCIE5, _PCIE_HOP),
            node_gbit=1600,
            host_gib=1024,
            host_bandwidth=614.4e9,
            host_flops=2 * 56 * 2.0e9 * 64,
            pcie=_PCIE5,
            nvme=_drives(4),
        ),
        _hopper("h100-sxm", "NVIDIA H100 datasheet (SXM5)", 80, 3350e9),
        _hopper("h200", "NVIDIA H200 datasheet (SXM5)", 141, 4800e9),
        _gpu(
            "b200",
            "NVIDIA Blackwell technical brief (HGX B200, 1000 W); DGX B200: 8 x 400 Gbit/s, 2 x Xeon 8570, 8 drives",
            Peaks(80 * _TERA, 1100 * _TERA, 2250 * _TERA, 2250 * _TERA, 4500 * _TERA),
            (10, 0),
            memory_gib=179,  # DGX B200 user guide: 1,440 GB for 8, as the driver reports it
            memory_bandwidth=8000e9,
            intra=Link(900e9, _NVLINK_HOP),
            node_gbit=3200,
            host_gib=2048,
            host_bandwidth=716.8e9,  # 2 sockets x 8 x DDR5-5600
            host_flops=2 * 56 * 2.1e9 * 64,
            pcie=_PCIE5,
            nvme=_drives(8),
        ),
        _gpu(
            "l4",
            "NVIDIA L4 datasheet; Google g2-standard-96: 8 x L4, 100 Gbit/s, 384 GiB, 48 Cascade Lake cores, 8 SSDs",
            Peaks(30.3 * _TERA, 60 * _TERA, 121 * _TERA, 121 * _TERA, 242.5 * _TERA),
            (8, 9),
            memory_gib=24,
            memory_bandwidth=300e9,
            intra=Link(_PCIE4, _PCIE_HOP),
            node_gbit=100,
            host_gib=384,
            host_bandwidth=281.6e9,  # 2 sockets x 6 x DDR4-2933
            host_flops=48 * 2.2e9 * 64,
            pcie=_PCIE4,
            nvme=_drives(1, 8 * 375e9, 3.1e9, 1.6e9),  # of 8, together
        ),
        _gpu(
            "rtx-4090",
            "NVIDIA Ada architecture paper (fp16, fp8 with float32 accumulation); 8-GPU EPYC 7763 server, 100 Gbit/s",
            Peaks(82.6 * _TERA, 82.6 * _TERA, 165.2 * _TERA, 165.2 * _TERA, 330.3 * _TERA),
            (8, 9),
            memory_gib=24,
            memory_bandwidth=1008e9,
            # No peer-to-peer access: a byte crosses PCIe to the host and again from it.
            intra=Link(_PCIE4 / 2, _PCIE_HOP),
            node_gbit=100,
            host_gib=512,
            host_bandwidth=204.8e9,  # 1 socket x 8 x DDR4-3200
            host_flops=64 * 2.45e9 * 32,
            pcie=_PCIE4,
            nvme=_drives(2),
        ),
        _gpu(
            "mi300x",
            "AMD Instinct MI300X datasheet; 8-GPU OAM platform: 8 x 400 Gbit/s, 2 x EPYC 9654, 12 x DDR5-4800 a socket",
            Peaks(163.4 * _TERA, 653.7 * _TERA, 1307.4 * _TERA, 1307.4 * _TERA, 2614.9 * _TERA),
            None,
            memory_gib=192,
            memory_bandwidth=5300e9,
            intra=Link(448e9, _NVLINK_HOP),  # 7 Infinity Fabric links of 64 GB/s in each direction
            node_gbit=3200,
            host_gib=2304,
            host_bandwidth=921.6e9,
            host_flops=2 * 96 * 2.4e9 * 32,
            pcie=_PCIE5,
            nvme=_drives(8),
        ),
        Machine(
            name="cpu",
            source="Machine.measure on Xeon (Sapphire Rapids), a rank a core; gloo gather of 2 ranks on one host",
            device=Device(Peaks(0.062 * _TERA, bfloat16=0.67 * _TERA), 11e9, 8 * _GIB, 2e-6),
            efficiency=Efficiency(1.0, 1.0, 1.0),
            intra_node=Link(1.8e9, 100e-6),
            inter_node=Link(0.625e9, 100e-6),  # half of 10 Gbit/s Ethernet
            ranks_per_node=2,
            host=Host(16 * _GIB, 22e9, 0.124 * _TERA, Link(5.6e9, 2e-6), Link(5.6e9, 2e-6)),
            nvme=Nvme(256 * _GIB, Link(0.8e9, _DRIVE_LATENCY), Link(1.3e9, _DRIVE_LATENCY)),
        ),
    )


def find_machine(name: str) -> Machine:
    """The built-in machine of that name; see `Machine.named`."""
    rows = {machine.name: machine for machine in list_machines()}
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in rows:
        return rows[wanted]
    near = difflib.get_close_matches(wanted, rows, n=3, cutoff=0.4) or [r for r in rows if r.startswith(wanted[:2])]
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    raise UsageError(f"no machine is named {name!r}: {hint}Known: {', '.join(rows)}; or use Machine.measure()")


def machine_of_device(device_name: str, memory_bytes: int) -> Machine | None:
    """The row that describes an accelerator by the name its driver gives it ("NVIDIA H200"), or None.

    Memory decides between the sizes of one part.
    """
    for part, name in (
        ("h100 pcie", "h100-pcie"),
        ("h100", "h100-sxm"),
        ("h200", "h200"),
        ("b200", "b200"),
        ("a100", "a100-80" if memory_bytes > 60 * _GIB else "a100-40"),
        ("v100", "v100-32"),
        ("mi300x", "mi300x"),
        ("4090", "rtx-4090"),
        ("l4", "l4"),
    ):
        # Whole words: an L40 is no L4, a GH200 no H200.
        if re.search(rf"\b{part}\b", device_name.lower()):
            return find_machine(name)
    return None
