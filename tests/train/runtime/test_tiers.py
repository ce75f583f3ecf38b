"""Tensors in slower tiers, by themselves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import TierError
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.scheduler.cost.transfers import PAGE, size_class

CPU = torch.device("cpu")
VALUES = {
    "matrix": lambda: torch.randn(70, 33),
    "transposed": lambda: torch.randn(70, 33).t(),
    "with gaps": lambda: torch.randn(64, 32).as_strided((60, 10), (32, 3)),
    "channels last": lambda: torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    "bf16": lambda: torch.randn(1001).bfloat16(),
    "bool": lambda: torch.rand(1000) > 0.5,
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
}


def make_tiers(folder: Path) -> Tiers:
    tiers = Tiers(CPU, [folder])
    tiers.prepare({"nvme": 1}, 1)
    return tiers


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", VALUES)
def test_what_comes_back_is_what_went(name: str, tier: str, tmp_path: Path) -> None:
    tiers, value = make_tiers(tmp_path), VALUES[name]()
    stored = tiers.offload(value, tier).finish(value)
    back = tiers.reload(stored).finish(stored)
    assert torch.equal(back, value) and back.dtype == value.dtype
    assert back.shape == value.shape and back.stride() == value.stride()
    tiers.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_bytes_are_counted_from_the_start_of_a_copy_to_the_last_name(tier: str, tmp_path: Path) -> None:
    tiers, value = make_tiers(tmp_path), torch.randn(1000)
    passing = 4000 if tier == "nvme" else 0
    pending = tiers.offload(value, tier)
    assert tiers.held_bytes == {"nvme": passing, "host": 4000}
    stored = pending.finish(value)
    del pending
    assert tiers.held_bytes == {"host": 0, "nvme": 0} | {tier: 4000}
    back = tiers.reload(stored)
    assert tiers.held_bytes["host"] == 4000
    back.finish(stored)
    assert tiers.held_bytes == {"host": 0, "nvme": 0} | {tier: 4000}
    assert tiers.peak_bytes["host"] == 4000
    del back, stored
    assert tiers.held_bytes == {"host": 0, "nvme": 0}
    tiers.reset_peak()
    assert tiers.peak_bytes == {"host": 0, "nvme": 0}
    links = {"to_host": 4000, "to_device": 4000, "nvme_read": passing, "nvme_write": passing}
    assert tiers.moved_bytes == links
    tiers.close()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_file_of_other_tiers_is_read_where_it_is(tier: str, tmp_path: Path) -> None:
    lender, borrower = make_tiers(tmp_path), make_tiers(tmp_path)
    value, other = torch.randn(1000), torch.randn(1000)
    stored = lender.offload(value, "nvme").finish(value)
    own = borrower.offload(other, "nvme").finish(other)  # by the same name in the borrower's folder
    back = borrower.reload(stored, tier).finish(stored)
    assert torch.equal(back.tensor if isinstance(back, Stored) else back, value)
    del back, stored, own
    borrower.close()
    lender.close()


def test_what_is_started_and_never_awaited_is_given_back(tmp_path: Path) -> None:
    tiers, value = make_tiers(tmp_path), torch.randn(1000)
    for tier in ("host", "nvme"):
        pending = tiers.offload(value, tier)
        tiers.settle()
        del pending
    assert tiers.held_bytes == {"host": 0, "nvme": 0}
    tiers.close()


def test_host_memory_is_not_taken_from_the_devices_allocator() -> None:
    tiers, value = Tiers(CPU, []), torch.randn(100_000)
    with CpuPeak() as peak:
        stored = tiers.offload(value, "host").finish(value)
    assert peak.num_bytes == 0
    del value
    with CpuPeak() as peak:
        back = tiers.reload(stored).finish(stored)
    assert peak.num_bytes == back.nbytes
    tiers.close()


def test_copies_run_one_behind_the_other() -> None:
    tiers = Tiers(CPU, [])
    value = torch.zeros(1000)
    pending = []
    for number in range(20):
        value = torch.full((1000,), float(number))
        pending.append((tiers.offload(value, "host"), value))
    stored = [one.finish(source) for one, source in pending]
    back = [tiers.reload(one) for one in stored]
    assert [float(one.finish(None)[0]) for one in back] == [float(number) for number in range(20)]
    tiers.close()


@given(st.integers(0, 2**40))
def test_size_classes_waste_at_most_a_sixteenth(num_bytes: int) -> None:
    size = size_class(num_bytes)
    assert size >= num_bytes and size % PAGE == 0
    assert size - num_bytes <= max(PAGE, num_bytes / 16)
    assert size_class(size) == size


def test_blocks_are_used_again() -> None:
    memory = HostMemory(pinned=False)
    first = memory.take(5000)
    address = first.data_ptr()
    assert address % PAGE == 0
    memory.give_back(first)
    assert memory.take(6000).data_ptr() == address


class Cudart:
    """CUDA's runtime as far as pinning goes: what it has pinned, by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.code = self.last = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.last = self.code
        if not self.code:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"

    def launch(self, *_: object, device: str) -> None:
        """A kernel: it reports the error of whatever call failed last."""
        failed, self.last = self.last, 0
        if failed:
            raise RuntimeError(f"error {failed}")


def test_a_pinned_block_is_no_larger_than_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = HostMemory(pinned=True, budget=64 * PAGE)
    block = memory.take(33 * PAGE)
    assert list(cudart.pinned.items()) == [(block.data_ptr(), memory.num_bytes)]
    assert memory.num_bytes < 64 * PAGE  # a power of two would be that
    part = block[:PAGE].view(torch.float32)
    memory.give_back(block)
    assert memory.take(33 * PAGE) is block and len(cudart.pinned) == 1
    memory.give_back(block)
    del block, part
    memory.clear()
    assert cudart.pinned == {} and memory.num_bytes == 0


def test_near_the_budget_no_more_is_pinned_again_than_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = HostMemory(pinned=True, budget=16 * PAGE)
    waiting = [memory.take(pages * PAGE) for pages in (8, 4, 3)]
    address = waiting[0].data_ptr()
    while waiting:
        memory.give_back(waiting.pop())
    small = memory.take(2 * PAGE)  # of which one page is left
    assert sorted(cudart.pinned.values()) == [2 * PAGE, 4 * PAGE, 8 * PAGE] and memory.num_bytes == 14 * PAGE
    used = [small, memory.take(8 * PAGE), memory.take(6 * PAGE)]  # for which what is left of the others goes
    assert used[1].data_ptr() == address
    assert sorted(cudart.pinned.values()) == [2 * PAGE, 6 * PAGE, 8 * PAGE]


def test_pinned_blocks_are_not_copied_into_processes_that_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    block = HostMemory(pinned=True).take(PAGE)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after.splitlines()[0].split() for before, after in itertools.pairwise(maps) if _has(before, block)]
    assert ["dc" in of_range for of_range in flags] == [True]


def _has(text: str, block: torch.Tensor) -> bool:
    """Whether the last range of memory in ``text`` has a block."""
    *_, span = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", text, re.MULTILINE)
    start, end = (int(address, 16) for address in span)
    return start <= block.data_ptr() < end


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    cudart.code = 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", cudart.launch)
    memory = HostMemory(pinned=True)
    with pytest.raises(TierError, match=r"error 2.*lower host_budget"):
        memory.take(PAGE)
    assert memory.num_bytes == 0
    cudart.launch(device="cuda")  # the step's next kernel


class QueuedCopy:
    """A copy that a device has queued: it has not run when computation has been told to wait for it."""

    def __init__(self) -> None:
        self.is_busy, self.num_waits = True, 0

    def join(self) -> None:
        self.is_busy, self.num_waits = False, self.num_waits + 1

    def finish(self) -> None:
        pass


def test_a_block_is_not_used_again_while_a_copy_of_it_is_queued() -> None:
    memory, queued = HostMemory(pinned=False), QueuedCopy()
    first, second = memory.take(5000), memory.take(5000)
    memory.give_back(first, [queued])
    memory.give_back(second)
    assert memory.take(5000) is second and queued.is_busy  # an idle one goes first
    assert memory.take(5000) is first and queued.num_waits == 1
    memory.give_back(first, [queued])
    assert memory.take(5000) is first and queued.num_waits == 1  # it had landed when it was given back
    queued.is_busy = True
    memory.give_back(first, [queued])
    memory.clear()
    assert queued.num_waits == 2 and memory.num_bytes == second.numel()


class QueuedCopies:
    """Copies as on a device with streams: started at once, and queued until someone waits for them."""

    def __init__(self) -> None:
        self.started: list[QueuedCopy] = []

    def start(
        self, stream: str, source: torch.Tensor, destination: torch.Tensor, after: Callable[[], None] | None = None
    ) -> QueuedCopy:
        if after is not None:
            after()
        destination.copy_(source)
        self.started.append(QueuedCopy())
        return self.started[-1]

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_a_queued_copy_to_the_device_reads_is_not_overwritten(tier: str, tmp_path: Path) -> None:
    tiers, copies = make_tiers(tmp_path), QueuedCopies()
    tiers._copies = copies
    value = torch.randn(1000)
    stored = tiers.offload(value, tier).finish(value)
    (out,) = copies.started
    out.is_busy = False
    tiers.reload(stored).finish(stored)
    back = copies.started[-1]
    del stored
    assert back.is_busy and tiers.held_bytes["host"] == 0
    other = tiers.offload(value, "host")  # takes the same block
    assert back.num_waits == 1
    del other
    tiers.close()
