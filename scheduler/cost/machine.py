"""The machine that a plan is made for: speeds and sizes, as plain data.

A `Machine` describes one accelerator, the node it sits in and the links between nodes. Numbers are what the datasheet
says; `Efficiency` is the part of them that programs get. Times are seconds, sizes are bytes, bandwidths are bytes per
second in one direction. Nothing here needs the hardware: `Machine.named("h100-sxm")` works on a laptop.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofx.errors import UsageError
from zerofx.json_format import from_data

if TYPE_CHECKING:
    import torch

# float64 runs at half the float32 rate on data-centre parts (A100, H100, MI300X datasheets) and far below on others.
_FLOAT64_OF_FLOAT32 = 0.5
_LEAST_SHARE = 1e-3  # of an update's seconds a byte that are a thread's, not memory's
MEASURED = "-measured"  # ends the name of a machine that was measured, not read from a datasheet


# No machine has less or more of anything; times and bytes that are computed of such numbers are finite.
_LEAST, _MOST = 1e-30, 1e30


class _Facts:
    """Numbers of a machine, all positive and finite; a latency may be 0."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # all that derive from it are dataclasses
            value = getattr(self, field.name)
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and not ((0 if "latency" in field.name else _LEAST) <= value <= _MOST)
            ):
                shown = value if isinstance(value, float) else f"{float(value):g}" if abs(value) < _MOST else "more"
                raise UsageError(
                    f"{type(self).__name__}.{field.name} must be positive and finite, found {shown}: give it as "
                    f"{_LEAST:g} to {_MOST:g}"
                )


@dataclass(frozen=True)
class Peaks(_Facts):
    """Peak FLOP/s of matrix multiplication by input type, dense (never "with sparsity"); None where there is none."""

    float32: float
    tf32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    fp8: float | None = None


@dataclass(frozen=True)
class Device(_Facts):
    """One accelerator: peak FLOP/s, memory traffic (read + written bytes/s), capacity, seconds to start a kernel.

    ``compute_capability`` is NVIDIA's, (9, 0) for an H100: what torch chooses kernels by. None for other devices.
    """

    peak: Peaks
    memory_bandwidth: float
    memory_bytes: int
    launch_latency: float
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Link(_Facts):
    """A link as one end sees it: bytes per second in one direction, and seconds before the first byte arrives."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class HostUpdate(_Facts):
    """Bytes a second that *one* rank's update on the host reads and writes: `bandwidth` on `num_threads` threads, of
    which each would have `thread_bandwidth` if memory gave it all that it asks for.

    Bandwidths add up as long as memory has more to give:

    1 / bandwidth(n) = 1 / (n * thread_bandwidth) + 1 / most        such that bandwidth(num_threads) is as seen
    """

    num_threads: int
    bandwidth: float
    thread_bandwidth: float

    @staticmethod
    def fit(rates: Mapping[int, float]) -> HostUpdate:
        """The curve through the rate, in bytes a second, of most threads, with least squares of the relative errors of
        all others."""
        most = max(rates)
        together = rates[most]
        points = [(1 / n - 1 / most, 1 / rate - 1 / together, rate**2) for n, rate in rates.items() if n < most]
        if not points:
            return HostUpdate(most, together, together / most)
        seconds = sum(x * y * weight for x, y, weight in points) / sum(x * x * weight for x, _, weight in points)
        # One thread may have all that memory gives: the fit is then a line of no slope, or of a falling one by noise.
        return HostUpdate(most, together, 1 / max(seconds, _LEAST_SHARE / together))

    def scale_to_threads(self, num_threads: int) -> HostUpdate:
        """The same on another number of threads."""
        alone = self.thread_bandwidth
        shared = max(0.0, 1 / self.bandwidth - 1 / (self.num_threads * alone))
        return HostUpdate(num_threads, 1 / (1 / (num_threads * alone) + shared), alone)


@dataclass(frozen=True)
class Host(_Facts):
    """The host of one node. Memory, its bandwidth and `flops` (float32) are totals that the node's ranks share.

    `to_host` and `to_device` are the copy paths of *one* device (device to host, host to device; pinned memory), while
    both are in use. `update` is what one rank's threads get of the memory's bandwidth; None for a rank's share of it.
    """

    memory_bytes: int
    memory_bandwidth: float
    flops: float
    to_host: Link
    to_device: Link
    update: HostUpdate | None = None


@dataclass(frozen=True)
class Nvme(_Facts):
    """All drives of one node together, shared by its ranks: capacity in bytes, and the read and write paths."""

    num_bytes: int
    read: Link
    write: Link


@dataclass(frozen=True)
class Efficiency(_Facts):
    """Fractions of the datasheet that programs get: large matmuls, memory-bound kernels, links. 1.0 where measured.

    ``convolution`` is what convolutions get of the rate of large matmuls; 1.0 where nobody has measured it.
    """

    matmul: float
    memory: float
    link: float
    convolution: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in dataclasses.asdict(self).items():
            if value > 1.0:
                raise UsageError(f"Efficiency.{name} must be a fraction of the peak, at most 1.0, found {value}")


@dataclass(frozen=True)
class Machine(_Facts):
    """One rank's accelerator, its node and the network.

    `inter_node` is one rank's share of the node's network, `ranks_per_node` how many ranks a node has: as many as it
    has places, or all there are (`for_ranks`). `allows_tf32`: whether float32 matmuls run on TF32 units where there are
    any, as `torch.set_float32_matmul_precision("high")` has it.
    """

    name: str
    source: str
    device: Device
    efficiency: Efficiency
    intra_node: Link
    inter_node: Link
    ranks_per_node: int
    host: Host
    nvme: Nvme | None
    allows_tf32: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise UsageError("Machine.name must not be empty")

    @staticmethod
    def named(name: str) -> Machine:
        """The built-in machine `name` ("h100-sxm"; case, blanks and underscores do not matter).

        Raises UsageError that lists the nearest names, and all of them, when there is none.
        """
        from zerofx.scheduler.cost.catalog import find_machine  # The table is made of Machines: import it when asked.

        return find_machine(name)

    @staticmethod
    def measure(device: torch.device | str | None = None, *, nvme_path: str | None = None) -> Machine:
        """Measure the machine at hand in some ten seconds, and keep the numbers for steps planned on it later.

        Every rank calls this together. What is kept is used where ``machine=`` is not given, by as many ranks with as
        many threads, and is measured anew by another call.

        Args:
            device: the current CUDA device if there is one, else the CPU with its current threads.
            nvme_path: a folder to time reads and writes in; None for a drive's typical numbers.

        Raises:
            UsageError: the device is neither a CPU nor a CUDA GPU, or ``nvme_path`` is no folder.
        """
        from zerofx.scheduler.cost.probe import measure_machine

        return measure_machine(device, nvme_path=nvme_path)

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """Achievable FLOP/s of a large matmul on `dtype` inputs."""
        return self.peak_flops(dtype) * self.efficiency.matmul

    def peak_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of matmuls on `dtype` inputs in the device's row: a datasheet's, or measured.

        A type without units of its own runs at the rate of the next wider one: fp8 as float16, others as float32.
        """
        import torch  # the table of machines is read without it

        peak = self.device.peak
        rate: float | None
        if dtype is torch.float64:
            rate = peak.float32 * _FLOAT64_OF_FLOAT32
        elif dtype is torch.bfloat16:
            rate = peak.bfloat16
        elif dtype is torch.float16:
            rate = peak.float16
        elif dtype.is_floating_point and dtype.itemsize == 1:
            rate = peak.fp8 or peak.float16
        else:
            rate = peak.tf32 if self.allows_tf32 and dtype is torch.float32 else None
        return rate or peak.float32

    def convolution_flops(self, dtype: torch.dtype) -> float:
        """Achievable FLOP/s of a convolution on `dtype` inputs."""
        return self.matmul_flops(dtype) * self.efficiency.convolution

    def vector_flops(self, dtype: torch.dtype) -> float:
        """Achievable FLOP/s outside matmuls: the float32 rate for all types (half for float64); no tensor cores."""
        import torch  # as there

        return self.device.peak.float32 * (_FLOAT64_OF_FLOAT32 if dtype is torch.float64 else 1.0)

    def for_ranks(self, num_ranks: int) -> Machine:
        """The machine as ``num_ranks`` ranks have it: fewer of them than a node has places share its host, its drives
        and their bandwidth among themselves alone."""
        return dataclasses.replace(self, ranks_per_node=min(num_ranks, self.ranks_per_node))

    def as_torch_computes(self) -> Machine:
        """The machine with TF32 allowed where this process's torch is set to use it, too."""
        import torch  # as there

        return dataclasses.replace(
            self, allows_tf32=self.allows_tf32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        )

    @property
    def is_cpu(self) -> bool:
        """True if the device is a CPU: the built-in row, or a measurement of one."""
        return self.name.partition("-")[0] == "cpu"

    @property
    def memory_bandwidth(self) -> float:
        """Achievable device memory traffic, bytes read plus written per second."""
        return self.device.memory_bandwidth * self.efficiency.memory

    @property
    def host_bytes_per_rank(self) -> int:
        """Bytes of host memory that are one rank's share."""
        return self.host.memory_bytes // self.ranks_per_node

    @property
    def nvme_bytes_per_rank(self) -> int:
        """Bytes of NVMe that are one rank's share, 0 without drives."""
        return 0 if self.nvme is None else self.nvme.num_bytes // self.ranks_per_node

    def host_seconds(self, flops: float, num_bytes: float) -> float:
        """Seconds of an update on one rank's share of the host's cores and memory, with no more of it than its threads
        get."""
        share = 1.0 / self.ranks_per_node
        memory = self.host.memory_bandwidth * self.efficiency.memory * share
        if self.host.update is not None:
            memory = min(memory, self.host.update.bandwidth)
        return max(flops / (self.host.flops * self.efficiency.matmul * share), num_bytes / memory)

    def to_json(self) -> str:
        """The machine as indented JSON text; `from_json` gives back an equal machine."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Machine:
        """Read what `to_json` wrote. Raises UsageError naming the field that is missing, unknown or of a wrong kind."""
        try:
            return from_data(Machine, json.loads(text), "machine")
        except json.JSONDecodeError as error:
            raise UsageError(f"machine: not valid JSON: {error}") from error
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
