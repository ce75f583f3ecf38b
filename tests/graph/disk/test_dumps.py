"""Generated files: in a folder of the user's own, cleared of what is old, but not of what a process runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.graph.disk.test_own_files import give_away, mode_of
from zerofx.disk import dumps
from zerofx.disk.own_files import notify_once
from zerofx.errors import UsageError, ZeroFXWarning

_DAY = 86_400


@pytest.fixture(autouse=True)
def _warnings_anew() -> None:
    notify_once.cache_clear()


class _Holder:
    pass


def name(number: int) -> str:
    return f"{number:012x}"


def aged(base: Path, number: int, days: float, source: str = "pass\n") -> Path:
    path = dumps.write_source(base, name(number), source)
    for one in (*path.parent.iterdir(), path.parent):
        os.utime(one, (time.time() - days * _DAY,) * 2)
    return path


def left(base: Path) -> set[int]:
    return {int(one, 16) for one in os.listdir(base)}


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    path = dumps.write_source(tmp_path / "dumps", name(1), "source")
    dumps.write_plan(path, "plan")
    assert path.read_text() == "source" and (path.parent / "plan.json").read_text() == "plan"
    assert [mode_of(one) for one in (tmp_path / "dumps", path.parent, path)] == [0o700, 0o700, 0o600]


def test_the_default_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert dumps.write_source(None, name(1), "") == tmp_path / "zerofx" / "dumps" / name(1) / "step.py"


def test_a_link_that_somebody_else_has_put_there_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, base = tmp_path / "victim", tmp_path / "dumps"
    victim.mkdir()
    (victim / "step.py").write_text("mine")
    base.symlink_to(victim)
    give_away(base, monkeypatch)
    with pytest.warns(ZeroFXWarning, match=r"a link of another user's.*Set ZEROFX_DUMP_DIR"):
        path = dumps.write_source(base, name(1), "source")
    assert path.read_text() == "source" and not path.is_relative_to(tmp_path / "dumps")
    assert os.listdir(victim) == ["step.py"] and (victim / "step.py").read_text() == "mine"


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.warns(ZeroFXWarning, match="others can write to") as caught:
        paths = [dumps.write_source(tmp_path, name(1), "source") for _ in range(2)]
    assert len(caught) == 1 and os.listdir(tmp_path) == [] and paths[0] == paths[1]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="set ZEROFX_DUMP_DIR"):
        dumps.write_source(tmp_path / "file", name(1), "source")


def test_old_folders_go(tmp_path: Path) -> None:
    for number, days in ((1, 8), (2, 6), (3, 30)):
        aged(tmp_path, number, days)
    dumps.write_source(tmp_path, name(4), "source")
    assert left(tmp_path) == {2, 4}


def test_the_oldest_folders_go_where_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "_MOST_BYTES", 2500)
    for number in range(1, 6):
        aged(tmp_path, number, 6 - number, "#" * 1000)
    dumps.write_source(tmp_path, name(9), "source")
    assert left(tmp_path) == {4, 5, 9}


def test_what_a_process_holds_stays_until_it_lets_go(tmp_path: Path) -> None:
    path, holder = aged(tmp_path, 1, 8), _Holder()
    num_open = len(os.listdir("/proc/self/fd"))
    dumps.hold(path, holder)
    os.utime(path.parent, (0, 0))
    os.utime(path.parent / ".lock", (0, 0))
    dumps.write_source(tmp_path, name(2), "source")
    assert left(tmp_path) == {1, 2}
    del holder
    assert len(os.listdir("/proc/self/fd")) == num_open
    dumps.write_source(tmp_path, name(2), "source")
    assert left(tmp_path) == {2}


def test_a_users_own_files_stay(tmp_path: Path) -> None:
    (aged(tmp_path, 1, 8).parent / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for one in ((tmp_path / name(1) / "notes.txt"), tmp_path / name(1)):
        os.utime(one, (0, 0))
    (tmp_path / name(3)).symlink_to(tmp_path)
    dumps.write_source(tmp_path, name(2), "source")
    assert set(os.listdir(tmp_path)) == {name(1), name(2), name(3), "notes.txt"}
