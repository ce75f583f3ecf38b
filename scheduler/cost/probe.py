"""Measures the machine at hand: a `Machine` from a few seconds of matmuls, copies, launches, messages and files.

Best of several runs each, so that noise makes a machine look slower only when it always is. What is not measured is
filled in from the built-in row of the same accelerator, and the `source` field says which parts those are. What was
measured is kept on disk, for steps that are planned later on the same machine.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from zerofx.disk.cache import DiskCache, key_of
from zerofx.errors import UsageError
from zerofx.optimizers.blocks import make_adamw_pass
from zerofx.progress import watch_progress
from zerofx.scheduler.cost.catalog import find_machine, machine_of_device
from zerofx.scheduler.cost.machine import MEASURED, Device, Efficiency, Host, HostUpdate, Link, Machine, Nvme, Peaks
from zerofx.settings import read_settings

_MIB = 2**20
_BUDGET = 0.25  # seconds for one quantity: a dozen of them stay below five seconds
_MIN_RUNS = 3
_LEAST_COPY_BYTES, _COPY_BYTES, _MOST_COPY_BYTES = 64 * _MIB, 128 * _MIB, 512 * _MIB
_ADAMW_BYTES = 16  # of all that the update has for a parameter: the arrays together are beyond the caches
_CACHE_SIZES = 4  # arrays are so many times as long as the last cache: what is left there is a small part
_COPY_BYTES_CUDA = 1024 * _MIB
_MATMUL_CPU, _MATMUL_CUDA = 1024, 8192  # side of the square matrices: large enough for the peak, 20 ms and 2 ms or so
_PIXELS, _IMAGES_CPU, _IMAGES_CUDA = 32, (16, 64), (128, 256)  # side of an image; images and their channels
# One where latency is most of the time, one where bandwidth is.
_MESSAGE_BYTES_CPU, _MESSAGE_BYTES_CUDA = (64 * 1024, 8 * _MIB), (64 * 1024, 128 * _MIB)
_FILE_BYTES, _BLOCK_BYTES = 64 * _MIB, 8 * _MIB
_LEAST_LATENCY = 1e-7  # seconds; a fit through two noisy points may come out negative


def measure_machine(device: torch.device | str | None = None, *, nvme_path: str | None = None) -> Machine:
    """Measure a device, its host and the links to other ranks: some ten seconds, and at most 1 GB of the host's memory
    or 4 GB of a GPU's.

    With an initialised process group of more than one rank every rank must call this: all measure at the same time,
    so that what they share (cores, memory bandwidth) is shared as in training, links are measured by passing messages
    round a ring, and every rank returns rank 0's numbers.

    Rank 0 keeps them in the folder of ``ZEROFX_CACHE_DIR``: ``read_kept_machine`` reads them.

    Arguments and errors are those of ``Machine.measure``.
    """
    where = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"can measure cpu and cuda devices, found {where}: describe it with Machine.from_json instead")
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks_on_node = _ranks_on_node(world)
    first = world == 1 or dist.get_rank() == 0
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    with torch.no_grad(), current, watch_progress("measuring the machine", show=first):
        machine = _measure_cpu(ranks_on_node) if where.type == "cpu" else _measure_cuda(where, ranks_on_node)
        if nvme_path is not None:
            machine = replace(machine, nvme=_measure_files(Path(nvme_path), ranks_on_node))
        if world > 1:
            # A ring within each node, and where there are several one over all ranks: that shows the network, which the
            # node's ranks share.
            if ranks_on_node > 1:
                ring = ranks_on_node if world % ranks_on_node == 0 else world
                machine = replace(machine, intra_node=_measure_link(where, ring))
            if world > ranks_on_node:
                link = _measure_link(where, world)
                machine = replace(machine, inter_node=Link(link.bandwidth / ranks_on_node, link.latency))
            machine = _broadcast_machine(machine)
        if where.type == "cuda":
            torch.cuda.empty_cache()
    if first:
        DiskCache(read_settings().cache_dir).write(_key(where, world), machine.to_json())
    return machine


def read_kept_machine(device: torch.device, num_ranks: int) -> Machine | None:
    """The machine last measured here for ``device`` with as many ranks and threads; None if there is none."""
    return DiskCache(read_settings().cache_dir).read_as(_key(device, num_ranks), Machine.from_json)


def processor_name() -> str:
    """The CPU's name as its maker has it, or else the kind of it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _key(device: torch.device, num_ranks: int) -> str:
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    host = (processor_name(), str(memory_bytes()), str(torch.get_num_threads()))
    return key_of("machine", [accelerator, *host, str(num_ranks), str(_ranks_on_node(num_ranks))])


def _ranks_on_node(num_ranks: int) -> int:
    """torchrun says how many ranks share the node; without it they are taken to be all on one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(num_ranks, int(local)) if local.isdigit() else num_ranks


def _measure_cpu(ranks: int) -> Machine:
    cpu = torch.device("cpu")
    row = find_machine("cpu")
    traffic = _copy_traffic(cpu, _bytes_beyond_caches())
    launch = _launch_seconds(cpu)
    float32 = _matmul_flops(cpu, torch.float32, _MATMUL_CPU)
    # bfloat16 without matrix units can be far slower than float32: one quarter of the side keeps that case short.
    bfloat16 = _matmul_flops(cpu, torch.bfloat16, _MATMUL_CPU // 4)
    if bfloat16 > float32 / 2:
        bfloat16 = _matmul_flops(cpu, torch.bfloat16, _MATMUL_CPU)
    total = memory_bytes()
    # A copy to the "host" of a CPU machine is a copy in the same memory: each byte is read once and written once.
    link = Link(traffic / 2, launch)
    return Machine(
        name=f"{row.name}{MEASURED}",
        source=f"measured: {torch.get_num_threads()} threads, {ranks} ranks a node; links and nvme of {row.name!r}",
        device=Device(Peaks(float32, bfloat16=bfloat16), traffic, max(1, total // ranks), launch),
        efficiency=Efficiency(1.0, 1.0, 1.0, _convolution_share(cpu, torch.float32)),
        intra_node=row.intra_node,
        inter_node=row.inter_node,
        ranks_per_node=ranks,
        host=Host(total, traffic * ranks, float32 * ranks, link, link, _host_update()),
        nvme=row.nvme,
    )


def _measure_cuda(device: torch.device, ranks: int) -> Machine:
    properties = torch.cuda.get_device_properties(device)
    row = machine_of_device(properties.name, properties.total_memory) or find_machine("h100-pcie")
    with _float32_matmul("ieee"):
        float32 = _matmul_flops(device, torch.float32, _MATMUL_CUDA // 2)
    with _float32_matmul("tf32"):
        tf32 = _matmul_flops(device, torch.float32, _MATMUL_CUDA)
    peak = Peaks(
        float32,
        tf32=max(tf32, float32),
        bfloat16=_matmul_flops(device, torch.bfloat16, _MATMUL_CUDA),
        float16=_matmul_flops(device, torch.float16, _MATMUL_CUDA),
        fp8=row.device.peak.fp8 and row.device.peak.fp8 * row.efficiency.matmul,
    )
    to_host, to_device = _host_links(device)
    host_traffic = _copy_traffic(torch.device("cpu"), _bytes_beyond_caches())
    host_flops = _matmul_flops(torch.device("cpu"), torch.float32, _MATMUL_CPU)
    return Machine(
        name=f"{row.name}{MEASURED}",
        source=f"measured on {properties.name}; fp8, nvme and links not measured are those of {row.name!r}",
        device=Device(
            peak,
            _copy_traffic(device, _COPY_BYTES_CUDA),
            properties.total_memory,
            _launch_seconds(device),
            None if torch.version.hip else (properties.major, properties.minor),
        ),
        efficiency=Efficiency(1.0, 1.0, 1.0, _convolution_share(device, torch.bfloat16)),
        intra_node=Link(row.intra_node.bandwidth * row.efficiency.link, row.intra_node.latency),
        inter_node=Link(row.inter_node.bandwidth * row.efficiency.link, row.inter_node.latency),
        ranks_per_node=ranks,
        host=Host(memory_bytes(), host_traffic * ranks, host_flops * ranks, to_host, to_device, _host_update()),
        nvme=row.nvme,
    )


def _best_seconds(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """The least seconds of several runs, after one to warm up."""
    run()
    synchronize()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < _MIN_RUNS or spent < _BUDGET:
        start = time.perf_counter()
        run()
        synchronize()
        seconds = time.perf_counter() - start
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return max(best, 1e-9)


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers as there are in training, without those of torch's own generator: a GPU computes faster with ones, which
    take less power."""
    return torch.randn(shape, generator=torch.Generator(device), device=device, dtype=dtype)


def _matmul_flops(device: torch.device, dtype: torch.dtype, side: int) -> float:
    a, b = (_random(device, dtype, side, side) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / _best_seconds(lambda: torch.mm(a, b, out=out), _synchronizer(device))


def _convolution_share(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a 3 x 3 convolution and its backward as a share of the rate of matmuls, at most 1.

    Matmuls are measured once more for it: other ranks may leave more to the one than to the other.
    """
    side, (num_images, channels) = (_MATMUL_CPU, _IMAGES_CPU) if device.type == "cpu" else (_MATMUL_CUDA, _IMAGES_CUDA)
    images, gradients = (_random(device, dtype, num_images, channels, _PIXELS, _PIXELS) for _ in range(2))
    filters = _random(device, dtype, channels, channels, 3, 3)
    places = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # no bias; stride, padding, dilation; one group

    def run() -> None:
        torch.ops.aten.convolution(images, filters, *places)
        torch.ops.aten.convolution_backward(gradients, images, filters, *places, [True, True, False])

    products = 3 * images.numel() * filters.numel() // channels  # forward, and for each of both gradients
    convolution_flops = 2 * products / _best_seconds(run, _synchronizer(device))
    return min(1.0, convolution_flops / _matmul_flops(device, dtype, side))


def _copy_traffic(device: torch.device, num_bytes: int) -> float:
    """Bytes read plus bytes written per second by a large copy."""
    a = torch.ones(num_bytes, device=device, dtype=torch.uint8)
    b = torch.zeros_like(a)
    return 2 * num_bytes / _best_seconds(lambda: b.copy_(a), _synchronizer(device))


def _bytes_beyond_caches() -> int:
    """Bytes of an array on the host of which caches hold a small part; a usual size where no cache is told of."""
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if name in os.sysconf_names]
    last = max((os.sysconf(name) for name in names), default=0)
    return min(_MOST_COPY_BYTES, max(_LEAST_COPY_BYTES, _CACHE_SIZES * last)) if last > 0 else _COPY_BYTES


def _host_update() -> HostUpdate:
    """The rate of an AdamW in bfloat16 with float32 masters as a step runs it on the host
    (``codegen/cpu/update_blocks.py``): on one thread, two, four ... and on all together."""
    most = torch.get_num_threads()
    update, num_bytes = make_adamw_pass(_bytes_beyond_caches() // _ADAMW_BYTES, most)
    rates: dict[int, float] = {}
    try:
        for threads in (*(2**power for power in range((most - 1).bit_length())), most):
            torch.set_num_threads(threads)
            rates[threads] = num_bytes / _best_seconds(update, lambda: None)
    finally:
        torch.set_num_threads(most)
    return HostUpdate.fit(rates)


def _launch_seconds(device: torch.device) -> float:
    """Seconds of a kernel without work, when many follow each other."""
    x = torch.zeros(1, device=device)
    repeats = 500

    def run() -> None:
        for _ in range(repeats):
            x.add_(1.0)

    return _best_seconds(run, _synchronizer(device)) / repeats


def _host_links(device: torch.device) -> tuple[Link, Link]:
    """Device to host and host to device, through pinned memory: latency from a small copy, bandwidth from a large one
    while the other way is as busy, as it is in a step that offloads."""
    small, large = 4096, 256 * _MIB
    pinned = [torch.empty(large, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
    remote = [torch.empty(large, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    ways = [(pinned[0], remote[0]), (remote[1], pinned[1])]
    synchronize = _synchronizer(device)

    def copy(way: int, num_bytes: int) -> None:
        into, source = ways[way]
        with torch.cuda.stream(streams[way]):
            into[:num_bytes].copy_(source[:num_bytes], non_blocking=True)

    def both() -> None:
        copy(0, large)
        copy(1, large)

    # Both end with the slower way: the other one is no slower than that.
    together = _best_seconds(both, synchronize)

    def seconds_of(way: int, num_bytes: int) -> float:
        return _best_seconds(lambda: copy(way, num_bytes), synchronize)

    def link(way: int) -> Link:
        return _fit((small, large), (seconds_of(way, small), max(seconds_of(way, large), together)))

    return link(0), link(1)


def _fit(sizes: tuple[int, int], seconds: tuple[float, float]) -> Link:
    """The line latency + bytes / bandwidth through two points; bandwidth of the larger alone if the line falls."""
    rise = seconds[1] - seconds[0]
    bandwidth = (sizes[1] - sizes[0]) / rise if rise > 0 else sizes[1] / seconds[1]
    return Link(bandwidth, max(seconds[0] - sizes[0] / bandwidth, _LEAST_LATENCY))


def _measure_link(device: torch.device, num_ranks: int) -> Link:
    """One hop of rings of ``num_ranks`` ranks each, in which all send to the next at the same time, as ring collectives
    do."""
    first, place = divmod(dist.get_rank(), num_ranks)
    after, before = (first * num_ranks + (place + step) % num_ranks for step in (1, -1))
    sizes = _MESSAGE_BYTES_CPU if device.type == "cpu" else _MESSAGE_BYTES_CUDA

    def seconds(num_bytes: int) -> float:
        outgoing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        incoming = torch.empty_like(outgoing)

        def send() -> None:
            operations = [dist.P2POp(dist.isend, outgoing, after), dist.P2POp(dist.irecv, incoming, before)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        def time_together() -> float:
            dist.barrier()  # ranks that drift apart send by turns, at half of what a link does both ways
            start = time.perf_counter()
            send()
            return time.perf_counter() - start

        # Every rank must send as often: a fixed number of runs, no time budget.
        return min(time_together() if device.type == "cpu" else _device_seconds(device, send) for _ in range(8))

    small, large = (seconds(num_bytes) for num_bytes in sizes)
    return _fit(sizes, (small, large))


def _device_seconds(device: torch.device, run: Callable[[], object], repeats: int = 8) -> float:
    """Seconds of the device in which it does what ``run`` starts there, after others like it.

    The device is busy meanwhile with products, since it does not wait for the host in a step either.
    """
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a = _random(device, torch.float32, _MATMUL_CUDA // 2, _MATMUL_CUDA // 2)
    out = torch.empty_like(a)
    run()
    torch.mm(a, a, out=out)
    begun.record()
    for _ in range(repeats):
        run()
    done.record()
    torch.cuda.synchronize(device)
    return float(begun.elapsed_time(done)) / 1e3 / repeats


def _broadcast_machine(machine: Machine) -> Machine:
    texts = [machine.to_json()]
    dist.broadcast_object_list(texts, src=0)
    return Machine.from_json(texts[0])


def _measure_files(folder: Path, ranks: int) -> Nvme:
    """Sequential write and read of one file in `folder`, past the page cache where the file system allows it.

    All `ranks` of the node do this at once, so their rates add up to the node's.
    """
    if not folder.is_dir():
        raise UsageError(f"nvme_path must be an existing folder, found {str(folder)!r}")
    handle, name = tempfile.mkstemp(dir=folder, prefix="zerofx-measure-")
    os.close(handle)
    # Anonymous maps are page-aligned, which direct I/O asks for.
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        try:
            write = _file_seconds(name, os.O_WRONLY, lambda descriptor: os.write(descriptor, block))
            read = _file_seconds(name, os.O_RDONLY, lambda descriptor: os.readv(descriptor, [block]))
        finally:
            os.unlink(name)
    typical = find_machine("cpu").nvme
    assert typical is not None
    return Nvme(
        max(1, shutil.disk_usage(folder).free),
        Link(ranks * _FILE_BYTES / read, typical.read.latency),
        Link(ranks * _FILE_BYTES / write, typical.write.latency),
    )


def _file_seconds(name: str, flags: int, move: Callable[[int], int]) -> float:
    """Seconds to move `_FILE_BYTES` through `move`, which moves one block."""
    try:
        descriptor = os.open(name, flags | getattr(os, "O_DIRECT", 0))
    except (
        OSError
    ):  # tmpfs and some network file systems have no direct I/O; the page cache is then part of the answer.
        descriptor = os.open(name, flags)
    try:
        start = time.perf_counter()
        moved = sum(move(descriptor) for _ in range(_FILE_BYTES // _BLOCK_BYTES))
        os.fsync(descriptor)
        seconds = time.perf_counter() - start
    finally:
        os.close(descriptor)
    if moved != _FILE_BYTES:
        raise UsageError(f"nvme_path: moved {moved} of {_FILE_BYTES} bytes of {name!r}: is the disk full?")
    return seconds


def memory_bytes() -> int:
    """Bytes of main memory that this process may use: the machine's, or its container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # Linux control groups, version 2
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


@contextlib.contextmanager
def _float32_matmul(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, precision
    try:
        yield
    finally:
        settings.fp32_precision = before
