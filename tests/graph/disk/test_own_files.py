"""Folders that others can write to are not used, links of others are not followed, and files are replaced whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zerofx import Plan
from zerofx.disk.own_files import UnsafeError, own_folder, read_own, unsafe_reason, write_own, write_text


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``path`` be another user's: root can give it away, and to anybody else what is their own is as foreign."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with pytest.raises(FileNotFoundError), own_folder(path):
        pass
    with own_folder(path, make=True) as folder:
        write_own(folder, "file", b"data")
        assert read_own(folder, "file") == b"data"
    assert [mode_of(one) for one in (tmp_path / "a", path, path / "file")] == [0o700, 0o700, 0o600]
    assert os.listdir(path) == ["file"]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UnsafeError, match=rf"others can write to .*open \(mode {mode:o}; chmod go-w"), own_folder(path):
        pass
    with pytest.raises(UnsafeError, match=r"chmod \+t"), own_folder(path, shared=True):
        pass
    path.chmod(mode | stat.S_ISVTX)
    assert unsafe_reason(path) and not unsafe_reason(path, shared=True)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    give_away(path, monkeypatch)
    assert "belongs to another user" in unsafe_reason(path) and "belongs to another user" in unsafe_reason(
        path, shared=True
    )


def test_links_count_if_they_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    for name, to in (("absolute", tmp_path / "real"), ("relative", Path("real")), ("up", Path("real/inner/.."))):
        (tmp_path / name).symlink_to(to)
        with own_folder(tmp_path / name / "inner") as folder:
            assert os.path.samestat(os.fstat(folder), (tmp_path / "real" / "inner").stat())
    (tmp_path / "round").symlink_to("round")
    assert "links" in unsafe_reason(tmp_path / "round")
    give_away(tmp_path / "relative", monkeypatch)
    assert "relative in" in unsafe_reason(tmp_path / "relative" / "inner")


@pytest.mark.parametrize("kind", ["link", "writable", "pipe", "folder", "theirs"])
def test_only_plain_files_of_the_users_own_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "other").write_text("text")
        path.symlink_to("other")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("text")
    with own_folder(tmp_path) as folder:
        if kind == "writable":
            path.chmod(0o622)
        if kind == "theirs":
            give_away(path, monkeypatch)
        with pytest.raises(OSError, match=r"no plain file|symbolic links"):
            read_own(folder, "file")


def test_a_link_where_a_file_goes_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "file").symlink_to("victim")
    with own_folder(tmp_path) as folder:
        write_own(folder, "file", b"data")
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "file").read_bytes() == b"data"


def test_a_folder_that_is_renamed_meanwhile_is_still_the_one_that_was_checked(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with own_folder(path, make=True) as folder:
        path.rename(tmp_path / "moved")
        path.mkdir()
        write_own(folder, "file", b"data")
    assert os.listdir(path) == [] and os.listdir(tmp_path / "moved") == ["file"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "before")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["plan.json"]


def test_a_file_keeps_its_mode_and_a_users_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "plan.json").symlink_to("real.json")
    write_text(tmp_path / "plan.json", "after")
    assert (tmp_path / "plan.json").is_symlink() and (tmp_path / "real.json").read_text() == "after"
    assert mode_of(tmp_path / "real.json") == 0o640
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "fresh.json", "text")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "fresh.json") == 0o640


def test_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_plans_are_saved_whole(tmp_path: Path) -> None:
    plan = Plan(0, 1, None, "cpu", "graph", (), (), ())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and os.listdir(tmp_path) == ["plan.json"]
