"""Files of the nvme tier: striped, in folders of their own, refused when they are not what was written."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import TierError, UsageError, ZeroFXWarning
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.runtime.tiers.nvme import BLOCK_BYTES, NvmeFile, NvmeFiles, Stripe
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.transfers import PAGE, whole_pages

CPU = torch.device("cpu")
LONG = 5 * BLOCK_BYTES + 12_345


class Drives(NamedTuple):
    """Some folders with files in them, and host memory to move from and to."""

    folders: list[Path]
    files: NvmeFiles
    memory: HostMemory

    def write(self, num_bytes: int, value: int = 7) -> NvmeFile:
        file, block = self.files.take(num_bytes), self.memory.take(num_bytes)
        block.copy_(torch.arange(len(block)) % 251 + value)
        self.files.write(file, block, lambda: None).result()
        self.memory.give_back(block)
        return file

    def read(self, file: NvmeFile) -> torch.Tensor:
        block = self.memory.take(file.num_bytes)
        self.files.read(file, block).result()
        return block[: file.num_bytes]

    def paths(self) -> list[Path]:
        return sorted(path for folder in self.folders for path in folder.glob("*/*.bin"))


@pytest.fixture(params=[1, 3])
def drives(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Drives]:
    folders = [tmp_path / str(number) for number in range(request.param)]
    for folder in folders:
        folder.mkdir()
    files = NvmeFiles(folders)
    yield Drives(folders, files, HostMemory(pinned=False))
    files.close()
    assert [list(folder.iterdir()) for folder in folders] == [[] for _ in folders]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("num_bytes", [0, 1, PAGE, BLOCK_BYTES, BLOCK_BYTES + 1, LONG])
def test_what_is_read_is_what_was_written(drives: Drives, num_bytes: int) -> None:
    file = drives.write(num_bytes)
    found = drives.read(file)
    assert torch.equal(found, (torch.arange(num_bytes) % 251 + 7).to(torch.uint8))


def test_long_files_are_divided_evenly_over_drives(drives: Drives) -> None:
    drives.write(6 * BLOCK_BYTES)
    each = 6 * BLOCK_BYTES // len(drives.folders)
    assert [path.stat().st_size for path in drives.paths()] == [each] * len(drives.folders)


def test_short_files_go_round_the_drives(drives: Drives) -> None:
    for _ in range(6):
        drives.write(100)
    counts = [len(list(folder.glob("*/*.bin"))) for folder in drives.folders]
    assert counts == [6 // len(drives.folders)] * len(drives.folders)


@given(st.integers(1, 40 * BLOCK_BYTES), st.integers(1, 5))
def test_blocks_cover_a_file_without_overlap(num_bytes: int, num_drives: int) -> None:
    file = NvmeFile(tuple(Stripe(drive, Path(str(drive))) for drive in range(num_drives)), num_bytes)
    spans = [file.span(block) for block in range(file.num_blocks)]
    assert [start for start, _ in spans] == [sum(length for _, length in spans[:i]) for i in range(len(spans))]
    assert sum(length for _, length in spans) == num_bytes and all(length > 0 for _, length in spans)
    for part in file.parts:
        offsets = [file.place(block)[1] for block in range(file.num_blocks) if file.place(block)[0] == part]
        assert offsets == [number * BLOCK_BYTES for number in range(len(offsets))]


def test_files_are_written_over_and_removed_where_there_is_no_room_for_more(drives: Drives) -> None:
    drives.files.reserve(3 * whole_pages(100_000))
    first = drives.write(100_000)
    drives.files.give_back(first)
    again = drives.write(99_999)
    assert again.parts == first.parts and again.hashes != first.hashes
    drives.files.give_back(again)
    drives.write(150_000)
    assert drives.files.file_bytes == whole_pages(100_000) + whole_pages(150_000)
    drives.write(150_000)
    assert drives.files.file_bytes == 2 * whole_pages(150_000), "the free file of another size had to go"
    assert not any(part.path.exists() for part in first.parts)


def test_what_was_changed_is_refused(drives: Drives) -> None:
    file = drives.write(LONG)
    part, offset = file.place(4)
    with part.path.open("r+b") as changed:
        changed.seek(offset + 1000)
        changed.write(b"\0\1")
    where = f"of bytes {offset} to {offset + BLOCK_BYTES} of {part.path}"
    with pytest.raises(TierError, match=rf"hash {file.hashes[4]:016x} {where}, found [0-9a-f]+"):
        drives.read(file)


@pytest.mark.parametrize("left", [2 * PAGE, 1000])
def test_what_was_cut_short_is_refused(drives: Drives, left: int) -> None:
    file = drives.write(LONG)
    part, offset = file.place(3)
    os.truncate(part.path, offset + left)
    with pytest.raises(
        TierError, match=rf"expected {BLOCK_BYTES} bytes at {offset} of {part.path}, found .* ends at {offset + left} "
    ):
        drives.read(file)


def test_two_blocks_that_changed_places_are_refused(drives: Drives) -> None:
    file = drives.write(LONG)
    file.hashes[0], file.hashes[1] = file.hashes[1], file.hashes[0]
    with pytest.raises(TierError, match="they are not what was written"):
        drives.read(file)


def test_a_file_that_is_gone_is_named(drives: Drives) -> None:
    file = drives.write(100)
    file.parts[0].path.unlink()
    with pytest.raises(TierError, match=rf"of {file.parts[0].path}, found that they could not be \(.*No such file"):
        drives.read(file)


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process can grow past so many bytes, as on a drive that is full."""
    limit, (soft, hard) = BLOCK_BYTES + 8 * PAGE, resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_a_drive_that_is_full_says_so_and_what_was_there_can_be_read(drives: Drives, small_files: int) -> None:
    kept = drives.write(BLOCK_BYTES)
    before = drives.read(kept).clone()
    with pytest.raises(TierError, match=r"could not be \(.*File too large.*\), with .* free: free some, or set ZEROFX"):
        drives.write(12 * BLOCK_BYTES)
    assert torch.equal(drives.read(kept), before)


def test_a_file_that_was_not_wholly_written_is_refused(drives: Drives, small_files: int) -> None:
    file = drives.files.take(12 * BLOCK_BYTES)
    block = drives.memory.take(file.num_bytes)
    with pytest.raises(TierError, match="File too large"):
        drives.files.write(file, block, lambda: None).result()
    with pytest.raises(TierError, match="not, or not wholly"):
        drives.read(file)


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_folder_that_cannot_hold_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("")
    other.mkdir()
    with pytest.raises(UsageError, match="found none: set ZEROFX_NVME_DIR"):
        Tiers(CPU, []).prepare({"nvme": 10}, 1)
    for wrong in (file, tmp_path / "missing"):
        with pytest.raises(UsageError, match=f"found that {wrong} is no folder"):
            Tiers(CPU, [other, wrong]).prepare({"nvme": 10}, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(2**20, 2**19, 2**19))
    with pytest.raises(UsageError, match=f"expected 768.0 KiB of space in {tmp_path} for.*, found 512.0 KiB"):
        Tiers(CPU, [tmp_path]).prepare({"nvme": 3 * 2**17}, 2)
    with pytest.raises(UsageError, match=f"expected 768.0 KiB of space in {tmp_path} and {other} .*, found 512.0 KiB"):
        Tiers(CPU, [tmp_path, other]).prepare({"nvme": 3 * 2**17}, 2)
    Tiers(CPU, []).prepare({"device": 1, "host": 1}, 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=f"found that {tmp_path} cannot be written to"):
        Tiers(CPU, [tmp_path]).prepare({"nvme": 10}, 1)
    assert sorted(tmp_path.iterdir()) == [file, other]


def test_folders_are_removed_again_where_one_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found that .*/missing is none"):
        NvmeFiles([tmp_path, tmp_path / "missing"])
    assert not list(tmp_path.iterdir())


_LEAVES_FILES = """
import os, sys
from pathlib import Path
from zerofx.runtime.tiers.nvme import NvmeFiles
files = NvmeFiles([Path(sys.argv[1])])
files.take(1).parts[0].path.write_bytes(b"left" * 5000)
if sys.argv[2] == "killed":
    os._exit(0)
"""


def _run(folder: Path, how: str) -> list[Path]:
    subprocess.run([sys.executable, "-c", _LEAVES_FILES, str(folder), how], check=True)
    return sorted(folder.iterdir())


@pytest.mark.days(3)
def test_folders_are_removed_when_the_process_ends_and_left_ones_by_the_next(tmp_path: Path) -> None:
    assert _run(tmp_path, "ends") == []
    left = _run(tmp_path, "killed")
    assert len(left) == 2 and len(list(left[0].iterdir())) == 1
    with pytest.warns(
        ZeroFXWarning, match=f"removed 20.0 KiB that processes which were killed have left in {tmp_path}"
    ):
        files = NvmeFiles([tmp_path])
    mine = sorted(tmp_path.iterdir())
    assert not set(mine) & set(left)
    other = NvmeFiles([tmp_path])
    assert set(mine) < set(tmp_path.iterdir()), "another's that is in use stays"
    other.close()
    files.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_held_for_as_long_as_the_folder_is_there(tmp_path: Path) -> None:
    files = NvmeFiles([tmp_path])
    (lock,) = tmp_path.glob("*.lock")
    with lock.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    files.close()
