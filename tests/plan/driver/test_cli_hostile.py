"""The command line, given what no program expects: an error in words, whatever it is, and never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zerofx
from zerofx import UsageError
from zerofx.cli.commands import main
from zerofx.disk.own_files import read_named, write_named
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.units import parse_bytes


def make() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 8),), lambda out, *_: out.square().mean()


WHERE = f"{__name__}:make"
PLAN = ["plan", WHERE, "--machine", "cpu"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "a full drive": ([*PLAN, "--save", "/dev/full"], "/dev/full: No space left on device"),
    "a full drive for a page": ([*PLAN, "--html", "/dev/full"], "/dev/full: No space left on device"),
    "a full drive for a trace": ([*PLAN, "--trace", "/dev/full"], "/dev/full: No space left on device"),
    "a full drive for a graph": ([*PLAN, "--save-graph", "/dev/full"], "/dev/full: No space left on device"),
    "a file without end": (["report", "/dev/zero"], "/dev/zero is a device"),
    "a graph without end": (["opt", "/dev/zero"], "/dev/zero is a device"),
    "a machine without end": (["plan", WHERE, "--machine", "/dev/../dev/zero.json"], "No such file"),
    "a device of others": (["tune", WHERE, "--device", "tpu"], "--device to be one that is here"),
    "a device that is not here": (["tune", WHERE, "--device", "cuda:99"], "found 'cuda:99'"),
    "a device of torch's": (["tune", WHERE, "--device", "xla"], "found 'xla'"),
    "no device": (["tune", WHERE, "--device", "cpu:7"], "found 'cpu:7'"),
    "a digit that is no number": ([*PLAN, "--accumulate", "\u00b2"], "expected a number of micro-batches"),
    "such a digit in a mesh": ([*PLAN, "--mesh", "shard=\u00b2"], "expected axes"),
    "a long number": ([*PLAN, "--accumulate", "9" * 5000], "expected a number of micro-batches"),
    "a long number in a mesh": ([*PLAN, "--mesh", f"shard={'9' * 5000}"], "expected axes"),
    "too many ranks": ([*PLAN, "--world-size", f"1{'0' * 30}"], "at most 16,777,216 ranks"),
    "too many ranks of a mesh": ([*PLAN, "--mesh", "replicate=1000000,shard=1000000"], "at most 16,777,216 ranks"),
    "a long budget": ([*PLAN, "--memory-budget", f"1{'0' * 400}GB"], "expected memory_budget to be a size"),
    "a long host budget": ([*PLAN, "--host-budget", f"1{'0' * 400}"], "expected host_budget to be a size"),
    "half a surrogate pair": (["plan", "\udc80:\udc80"], r"there is no module '\udc80'"),
    "half a pair as a machine": (["plan", WHERE, "--machine", "\udc80"], r"'\udc80'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_an_error_in_words(name: str) -> None:
    arguments, text = REFUSED[name]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert text in result.output and "Please report it" not in result.output


def test_output_that_cannot_be_written_is_said_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zerofx", "machines"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode and "standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", [5e-324, 1e308, 10**400, float("inf"), 0, -1])
def test_no_machine_makes_times_infinite(value: float, tmp_path: Path) -> None:
    row = json.loads(zerofx.Machine.named("cpu").to_json())
    row["device"]["memory_bandwidth"] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(row))
    result = CliRunner().invoke(main, ["plan", WHERE, "--machine", str(file)])
    assert result.exit_code == 2 and "positive and finite" in result.output


def test_names_that_utf_8_has_no_bytes_for_are_written_escaped(tmp_path: Path) -> None:
    row = json.loads(zerofx.Machine.named("cpu").to_json())
    file, page = tmp_path / "machine.json", tmp_path / "page.html"
    file.write_text(json.dumps({**row, "name": "half a pair: \udc80"}))
    written = ["--html", str(page), "--save", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(main, ["plan", WHERE, "--machine", str(file), *written])
    assert result.exit_code == 0, result.exception
    assert r"half a pair: \udc80" in result.output
    assert "half a pair" in page.read_text()


def test_files_without_end_are_not_read_and_what_is_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match="is a device"):
            read_named(device)
    file = tmp_path / "text"
    write_named(file, "half a pair: \udc80")
    assert read_named(file) == r"half a pair: \udc80"
    monkeypatch.setattr("zerofx.disk.own_files._MOST_BYTES", 4)
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_named(file)
    for path in (tmp_path / "none" / "text", tmp_path, "a\0b"):
        with pytest.raises(UsageError, match="expected a file that can be written"):
            write_named(path, "text")


def test_sizes_are_exact_and_meshes_are_of_this_world() -> None:
    assert parse_bytes(f"1{'0' * 25}") == 10**25 and parse_bytes("1.1GB") == 1_100_000_000
    assert Mesh(shard=2**24).num_ranks == 2**24
    with pytest.raises(UsageError, match="at most"):
        Mesh(replicate=2, shard=2**24)
