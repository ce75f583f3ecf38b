"""The switches that are read from the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerofx.settings
from tests.lib.checkout import ROOT
from zerofx.errors import UsageError
from zerofx.settings import read_settings

_DOCS = ROOT / "docs"
_NAMES = ("DEBUG", "DUMP_DIR", "DISABLE", "VERIFY", "TIMEOUT", "NVME_DIR", "CACHE_DIR", "KERNELS")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(f"ZEROFX_{name}", raising=False)


def test_defaults() -> None:
    found = read_settings()
    assert (found.debug, found.verify, found.timeout_seconds, found.disable) == (0, 1, 600.0, frozenset())
    assert found.dump_dir is None and found.nvme_dirs == ()


def test_every_switch_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in zip(
        _NAMES,
        ("5", str(tmp_path), "prefetch,simplify,", "2", "7", "drive:other", "kept", "update,loss"),
        strict=True,
    ):
        monkeypatch.setenv(f"ZEROFX_{name}", value)
    found = read_settings()
    assert found.disable == {"prefetch", "simplify"}
    assert (found.debug, found.dump_dir, found.verify, found.timeout_seconds) == (5, tmp_path, 2, 7.0)
    assert found.nvme_dirs == (Path("drive"), Path("other"))
    assert found.cache_dir == Path("kept")
    assert found.kernels == frozenset({"update", "loss"})


@pytest.mark.parametrize(("value", "expected"), [("auto", None), ("none", frozenset())])
def test_kernels_are_those_on_by_default_or_none(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: frozenset[str] | None
) -> None:
    assert read_settings().kernels is None
    monkeypatch.setenv("ZEROFX_KERNELS", value)
    assert read_settings().kernels == expected


@pytest.mark.parametrize(
    ("given", "inductor", "user", "expected"),
    [
        ("", "inductor", "user", None),
        ("0", "inductor", "user", None),
        ("own", "inductor", "user", "own"),
        (None, "inductor", "user", "inductor/zerofx"),
        (None, None, "user", "user/zerofx"),
        (None, None, None, "~/.cache/zerofx"),
    ],
)
def test_the_folder_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, given: str | None, inductor: str | None, user: str | None, expected: str | None
) -> None:
    names = ("ZEROFX_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    for name, value in zip(names, (given, inductor, user), strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert read_settings().cache_dir == (Path(expected).expanduser() if expected is not None else None)


@pytest.mark.parametrize(
    ("name", "value", "largest"),
    [("DEBUG", "6", 5), ("DEBUG", "-1", 5), ("DEBUG", "much", 5), ("VERIFY", "3", 2), ("TIMEOUT", "1.5", 86_400)],
)
def test_a_value_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, largest: int
) -> None:
    monkeypatch.setenv(f"ZEROFX_{name}", value)
    with pytest.raises(UsageError, match=rf"expected ZEROFX_{name} .* from 0 to {largest}, found '{value}'"):
        read_settings()


def _rows(text: str) -> dict[str, str]:
    """Switch to description of a table in either markup, spacing and line breaks aside."""
    text = re.sub(r"``?", "", text)
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [line]
        match = re.match(r"\s*(ZEROFX_\w+)\s*(.*)", " ".join(cells))
        if match:
            current = match[1]
            found[current] = match[2]
        elif current and line.startswith("   "):
            found[current] += " " + line.strip()
        else:
            current = ""
    return {name: " ".join(words.split()) for name, words in found.items()}


def test_the_documented_table_is_that_of_the_module() -> None:
    assert zerofx.settings.__doc__ is not None
    documented = _rows((_DOCS / "switches.md").read_text())
    assert set(documented) == {f"ZEROFX_{name}" for name in _NAMES}
    assert documented == _rows(zerofx.settings.__doc__)
