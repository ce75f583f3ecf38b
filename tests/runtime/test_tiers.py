"""Tensors in slower tiers, by themselves."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import TierError, UsageError
from zerofx.runtime.host_memory import PAGE, HostMemory, size_class
from zerofx.runtime.measure import CpuPeak
from zerofx.runtime.nvme import NvmeFiles
from zerofx.runtime.tiers import Tiers

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
    tiers = Tiers(CPU, folder)
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


def test_what_is_started_and_never_awaited_is_given_back(tmp_path: Path) -> None:
    tiers, value = make_tiers(tmp_path), torch.randn(1000)
    for tier in ("host", "nvme"):
        pending = tiers.offload(value, tier)
        tiers.settle()
        del pending
    assert tiers.held_bytes == {"host": 0, "nvme": 0}
    tiers.close()


def test_host_memory_is_not_taken_from_the_devices_allocator() -> None:
    tiers, value = Tiers(CPU, None), torch.randn(100_000)
    with CpuPeak() as peak:
        stored = tiers.offload(value, "host").finish(value)
    assert peak.num_bytes == 0
    del value
    with CpuPeak() as peak:
        back = tiers.reload(stored).finish(stored)
    assert peak.num_bytes == back.nbytes
    tiers.close()


def test_copies_run_one_behind_the_other() -> None:
    tiers = Tiers(CPU, None)
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
def test_size_classes_waste_at_most_a_quarter(num_bytes: int) -> None:
    size = size_class(num_bytes)
    assert size >= num_bytes and size % PAGE == 0
    assert size - num_bytes <= max(PAGE, num_bytes / 4)
    assert size_class(size) == size


def test_blocks_are_used_again() -> None:
    memory = HostMemory(pinned=False)
    first = memory.take(5000)
    address = first.data_ptr()
    assert address % PAGE == 0
    memory.give_back(first)
    assert memory.take(6000).data_ptr() == address


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_folder_that_cannot_hold_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="found none: set ZEROFX_NVME_DIR"):
        Tiers(CPU, None).prepare({"nvme": 10}, 1)
    with pytest.raises(UsageError, match=f"found that {file} is no folder"):
        Tiers(CPU, file).prepare({"nvme": 10}, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(2**20, 2**19, 2**19))
    with pytest.raises(UsageError, match=f"expected 768.0 KiB of space in {tmp_path}.*, found 512.0 KiB"):
        Tiers(CPU, tmp_path).prepare({"nvme": 3 * 2**17}, 2)
    Tiers(CPU, None).prepare({"device": 1, "host": 1}, 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=f"found that {tmp_path} cannot be written to"):
        Tiers(CPU, tmp_path).prepare({"nvme": 10}, 1)
    assert list(tmp_path.iterdir()) == [file]


def test_errors_name_the_file(tmp_path: Path) -> None:
    tiers, value = make_tiers(tmp_path), torch.randn(10_000)
    stored = tiers.offload(value, "nvme").finish(value)
    path = stored.lease.place
    assert isinstance(path, Path)
    os.truncate(path, 2 * PAGE)
    with pytest.raises(TierError, match=rf"{path} could not be \(.*ends at 8192 bytes\)"):
        tiers.reload(stored).finish(stored)
    tiers.close()


_LEAVES_FILES = """
import os, sys
from pathlib import Path
from zerofx.runtime.nvme import NvmeFiles
files = NvmeFiles(Path(sys.argv[1]))
(files.take(1)).write_text("left")
if sys.argv[2] == "killed":
    os._exit(0)
"""


def _run(folder: Path, how: str) -> list[Path]:
    subprocess.run([sys.executable, "-c", _LEAVES_FILES, str(folder), how], check=True)
    return sorted(folder.iterdir())


def test_folders_are_removed_when_the_process_ends_and_left_ones_by_the_next(tmp_path: Path) -> None:
    assert _run(tmp_path, "ends") == []
    left = _run(tmp_path, "killed")
    assert len(left) == 2 and len(list(left[0].iterdir())) == 1
    files = NvmeFiles(tmp_path)
    mine = sorted(tmp_path.iterdir())
    assert not set(mine) & set(left)
    other = NvmeFiles(tmp_path)
    assert set(mine) < set(tmp_path.iterdir()), "another's that is in use stays"
    other.close()
    files.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_held_for_as_long_as_the_folder_is_there(tmp_path: Path) -> None:
    files = NvmeFiles(tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    with lock.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    files.close()
