"""What is imported when: nothing heavy before it is used. And what ``zerofx doctor`` says, of broken machines too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerofx
from zerofx.cli import doctor
from zerofx.cli.commands import main

# Each takes a tenth of a second to several seconds to import.
HEAVY = ("matplotlib", "networkx", "numpy", "pandas", "safetensors", "sympy", "torch", "transformers", "triton")
# What only a capture, a search or a compiler needs, once torch is there.
LATE = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "sympy",
    "networkx",
    "transformers",
    "triton",
)


def imported(program: str) -> set[str]:
    """The modules that a fresh Python has once it has run ``program``."""
    shown = "import json, sys\nprint()\nprint(json.dumps(list(sys.modules)))"
    text = f"try:\n    {program}\nexcept SystemExit:\n    pass\n{shown}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=600)
    return set(json.loads(done.stdout.splitlines()[-1]))


def command(*words: str) -> str:
    return f"from zerofx.cli.commands import main; main({list(words)!r})"


@pytest.mark.parametrize(
    "program",
    ["import zerofx", command("--help"), command("machines"), command("--version"), command("plan", "--help")],
)
def test_nothing_heavy_is_imported_for_what_needs_nothing(program: str) -> None:
    modules = imported(program)
    assert "zerofx" in modules and not modules & set(HEAVY)


def test_torch_is_all_that_comes_with_a_plan_file() -> None:
    modules = imported("import torch, zerofx; zerofx.Plan, zerofx.Machine")
    alone = imported("import torch")
    assert "zerofx.scheduler.plan.plan" in modules and not (modules - alone) & set(LATE)


def test_every_name_is_there_once_it_is_asked_for() -> None:
    for name in zerofx.__all__:
        assert getattr(zerofx, name) is not None and name in dir(zerofx)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        zerofx.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"zerofx, version {zerofx.__version__}\n"


def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for line in doctor.examine():
        if line.startswith("  "):
            sections[next(reversed(sections))].append(line.strip())
        else:
            sections[line.removesuffix(":")] = []
    return sections


def test_the_doctor_says_what_a_report_of_a_bug_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "open"))
    monkeypatch.setenv("ZEROFX_DUMP_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("ZEROFX_NVME_DIR", str(tmp_path / "open"))
    monkeypatch.setenv("ZEROFX_DISABLE", "stamp")
    found = told(monkeypatch)
    assert list(found) == ["versions", "compiler", "devices", "switches", "folders", "left out"]
    assert found["versions"][0].startswith(f"zerofx {zerofx.__version__} in ")
    assert any(line.startswith("torch ") for line in found["versions"])
    assert any(line.startswith("CPU: ") for line in found["devices"])
    cache, dumps, nvme, _ = found["folders"]
    assert "NOT USED: others can write to" in cache and "NOT USED" in nvme and "chmod +t" in nvme
    assert dumps.startswith(f"generated files: {tmp_path / 'new'}, not there yet")
    assert f"ZEROFX_CACHE_DIR={tmp_path / 'open'}" in found["switches"]
    assert "stamp: ZEROFX_DISABLE names it" in found["left out"]


def test_the_doctor_goes_on_where_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "much")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it cannot be imported
    found = told(monkeypatch)
    assert "this could not be found out: " in found["versions"][-1] and len(found["versions"]) > 5
    assert found["compiler"][0] == "/no/such/compiler: not found"
    assert "ZEROFX_DEBUG" in found["folders"][-1] and "ZEROFX_DEBUG=much" in found["switches"]
    assert found["left out"] and list(found)[-1] == "left out"


def test_the_doctor_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0 and "folders:" in result.output
