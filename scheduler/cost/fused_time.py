"""What the kernels of a compiled region take on a GPU: each a roofline of what it reads and writes in memory.

Loops that Inductor fuses read what is outside their kernel once, and write what is read outside it; what is inlined
into its readers moves nothing (``fusion.py`` says which). All else takes what it takes alone (``roofline.py``).

Not covered: a kernel that moves less than the device's bandwidth, because it has few elements or reads them out of
order. On CPUs loops are bound by their arithmetic, which this would leave out.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from zerofx.ir.aliasing import Storage, storage_source, tensors_of
from zerofx.scheduler.analysis.saved_values import storage_size
from zerofx.scheduler.cost.fusion import Fused, fuse, is_inlined, is_loop, outputs_of
from zerofx.scheduler.cost.liveness import RegionLike
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost, node_flops, touched_bytes


def fused_seconds(region: RegionLike, machine: Machine) -> float:
    """Seconds that ``region`` takes."""
    fused = fuse(region)
    return sum(_seconds(kernel, fused, machine) for kernel in fused.kernels)


def _seconds(kernel: list[fx.Node], fused: Fused, machine: Machine) -> float:
    if len(kernel) == 1 and not is_loop(kernel[0]):
        return node_cost(kernel[0], machine).seconds
    read, computed = _read(kernel, fused)
    own = set(kernel)
    num_bytes = sum(size for storage, size in read.items() if storage[0] not in own)
    num_bytes += sum(storage_size(s) for node in kernel for s in outputs_of(node) if s in fused.stored)
    dtype = tensors_of(kernel[-1])[0].dtype
    arithmetic = sum(map(node_flops, computed)) / machine.vector_flops(dtype)
    return max(arithmetic, num_bytes / machine.memory_bandwidth) + machine.device.launch_latency


def _read(kernel: Iterable[fx.Node], fused: Fused) -> tuple[dict[Storage, int], set[fx.Node]]:
    """Bytes of each storage in memory that a kernel reads, and all that it computes, what is inlined included."""
    read: dict[Storage, int] = {}
    computed = set(kernel)
    pending = list(computed)
    while pending:
        for source in pending.pop().all_input_nodes:
            storage = storage_source(source)
            owner = storage[0]
            if storage in fused.stored or owner not in fused.members or not is_inlined(owner):
                size = sum(map(touched_bytes, tensors_of(source)))
                read[storage] = max(read.get(storage, 0), min(size, storage_size(storage)))
            elif owner not in computed:
                computed.add(owner)
                pending.append(owner)
    return read, computed
