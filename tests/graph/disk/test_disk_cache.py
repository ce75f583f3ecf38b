"""What is kept on disk: found again, or absent where it is damaged, of other versions, or too much."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from zerofx.disk import cache as disk_cache
from zerofx.disk.cache import NOT_KEPT, DiskCache, _hash_of_sources, key_of
from zerofx.errors import ZeroFXWarning

TEXT = "what was made, ü\n" * 1000


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cache, key = DiskCache(tmp_path / "new" / "folder"), key_of("plan", ["a part"])
    assert cache.read(key) is None
    cache.write(key, TEXT)
    assert cache.read(key) == TEXT
    assert DiskCache(tmp_path / "new" / "folder").read(key) == TEXT
    assert cache.read(key_of("step", ["a part"])) is None
    assert cache.read(key_of("plan", ["another part"])) is None
    assert [path.name for path in cache.folder.iterdir()] == [key] if cache.folder else False


def test_without_a_folder_nothing_is_kept() -> None:
    NOT_KEPT.write("key", TEXT)
    assert NOT_KEPT.read("key") is None


def test_parts_are_told_apart() -> None:
    assert key_of("plan", ["ab", "c"]) != key_of("plan", ["a", "bc"])


def test_other_versions_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of("plan", [])}
    versions = ((torch, "__version__"), (torch.version, "git_version"), (torch.version, "cuda"), (sys, "version"))
    for module, name in versions:
        with monkeypatch.context() as changed:
            changed.setattr(module, name, "another")
            keys.add(key_of("plan", []))
    with monkeypatch.context() as changed:
        changed.setattr(disk_cache, "_hash_of_sources", lambda folder: "another")
        keys.add(key_of("plan", []))
    assert len(keys) == 6
    assert key_of("plan", []) in keys


def test_a_change_of_any_source_is_another_hash(tmp_path: Path) -> None:
    package = tmp_path / "package"
    for folder in (package / "inner", tmp_path / "beside"):
        folder.mkdir(parents=True)
    (package / "linked").symlink_to(tmp_path / "beside", target_is_directory=True)
    hashes = []
    for path, text in (("a.py", "1"), ("a.py", "2"), ("inner/b.py", "2"), ("inner/c.py", "2"), ("linked/d.py", "2")):
        (package / path).write_text(text)
        _hash_of_sources.cache_clear()
        hashes.append(_hash_of_sources(package))
    (package / "a.txt").write_text("no source")
    _hash_of_sources.cache_clear()
    assert len(set(hashes)) == 5 and _hash_of_sources(package) == hashes[-1]


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign", "of another key", "a folder"])
def test_what_is_damaged_counts_as_absent_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path)
    cache.write("key", TEXT)
    path = tmp_path / "key"
    data = path.read_bytes()
    if damage == "of another key":
        cache.write("other", "another text")
        data = (tmp_path / "other").read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
        assert cache.read("key") is None
        return
    changed = {
        "empty": b"",
        "truncated": data[:-7],
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "foreign": b"{}" * 99,
    }
    path.write_bytes(changed.get(damage, data))
    assert cache.read("key") is None
    cache.write("key", TEXT)
    assert cache.read("key") == TEXT


def test_what_was_not_read_for_longest_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=3 * _entry_bytes(tmp_path))
    first, second, third, fourth = (key_of("plan", [str(number)]) for number in range(4))
    for number, key in enumerate((first, second, third)):
        cache.write(key, TEXT)
        os.utime(tmp_path / key, (number, number))
    assert cache.read(first) == TEXT  # which makes it the latest
    cache.write(fourth, TEXT)
    assert {path.name for path in tmp_path.iterdir()} == {first, third, fourth}


def _entry_bytes(folder: Path) -> int:
    key = key_of("plan", ["size"])
    DiskCache(folder).write(key, TEXT)
    size = (folder / key).stat().st_size
    (folder / key).unlink()
    return size


def test_other_files_in_the_folder_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=_entry_bytes(tmp_path))
    others = [tmp_path / name for name in ("checkpoint.pt", "sha256-" + 64 * "a", "plan-b", "download.part")]
    for path in others:
        path.write_bytes(b"mine" * 10_000)
    folders = [tmp_path / "folder", tmp_path / ("plan-" + 64 * "c")]
    for path in folders:
        path.mkdir()
    left_over = tmp_path / "zerofx-left_over.part"
    left_over.write_bytes(b"part")
    for path in (*others, *folders, left_over):
        os.utime(path, (0, 0))
    first, second = key_of("plan", ["first"]), key_of("step", ["second"])
    cache.write(first, TEXT)
    assert cache.read(first) == TEXT and not left_over.exists()
    cache.write(second, TEXT)
    assert {path.name for path in tmp_path.iterdir()} == {second, *(path.name for path in (*others, *folders))}


def test_what_cannot_be_marked_as_read_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, dir_fd: int) -> None:
        raise PermissionError(path)

    cache, key = DiskCache(tmp_path), key_of("plan", [])
    cache.write(key, TEXT)
    monkeypatch.setattr(os, "utime", refused)  # as in a folder that root has written and another user reads
    assert cache.read(key) == TEXT


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(ZeroFXWarning, match="ZEROFX_CACHE_DIR"):
        DiskCache(tmp_path / "file").write("key", TEXT)
    assert DiskCache(tmp_path / "file").read("key") is None


def _write_and_read(folder: Path, number: int) -> int:
    cache, others = DiskCache(folder, most_bytes=1000), 0
    shared = key_of("step", ["shared"])
    for turn in range(100):
        cache.write(shared, TEXT)
        cache.write(key_of("plan", [f"{number} {turn}"]), TEXT)
        others += cache.read(shared) not in (None, TEXT)
    return others


def test_processes_that_write_at_the_same_time_see_whole_entries(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        found = list(pool.map(_write_and_read, [tmp_path] * 2, range(2)))
    assert found == [0, 0]
    assert not list(tmp_path.glob("*.part"))
