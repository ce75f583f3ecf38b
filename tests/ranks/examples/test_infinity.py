"""A model larger than the memory it is given: it trains, and to the bit as without the limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from tests.lib.scripts import run_script

CAP = "1.25GiB"  # beyond Python and torch; weights, gradients and states of 125M parameters alone are 1.9 GiB


SCRIPT = ROOT / "examples" / "train_infinity.py"


def run(drive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example with its files in `drive`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        "ZEROFX_NVME_DIR": str(drive),
        "ZEROFX_DUMP_DIR": str(drive / "generated"),
    }
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def told(output: str) -> tuple[list[float], str]:
    """The losses, and the digest of the parameters, that a run has printed."""
    losses = [float.fromhex(text) for text in re.findall(r"^step \d+  loss \S+ \((\S+)\)", output, re.MULTILINE)]
    digest = re.search(r"^parameters ([0-9a-f]{64})$", output, re.MULTILINE)
    assert digest is not None, output
    return losses, digest[1]


def test_a_tiny_model_trains_from_the_drive_as_it_does_without_zerofx(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_DUMP_DIR", str(drive / "generated"))
    tiny = ("--size", "tiny", "--steps", "3", "--digest")
    found = run_script(SCRIPT, *tiny, "--budget", "1500KiB", "--table")
    assert "parameters: 3 of 3 on nvme" in found and "plain AdamW" in found
    assert told(found) == told(run_script(SCRIPT, *tiny, "--plain"))
    assert [path.name for path in drive.iterdir()] == ["generated"]


@pytest.mark.slow
def test_125_million_parameters_train_where_plain_training_does_not_fit(tmp_path: Path) -> None:
    size = ("--size", "125M", "--steps", "2")
    capped = run(tmp_path, *size, "--budget", "300MiB", "--cap", CAP, "--digest")
    assert capped.returncode == 0, capped.stderr
    losses, digest = told(capped.stdout)
    assert losses[1] < losses[0]
    assert told(run(tmp_path, *size, "--plain", "--digest").stdout) == (losses, digest)
    too_large = run(tmp_path, *size, "--plain", "--cap", CAP)
    assert too_large.returncode != 0
    assert re.search(r"MemoryError|not enough memory|Cannot allocate memory", too_large.stderr)


@pytest.mark.slow
def test_host_memory_serves_as_well(tmp_path: Path) -> None:
    found = run(tmp_path, "--size", "tiny", "--steps", "2", "--budget", "1500KiB", "--offload", "host", "--digest")
    plain = run(tmp_path, "--size", "tiny", "--steps", "2", "--plain", "--digest")
    assert "parameters: 3 of 4 on host" in found.stdout
    assert told(found.stdout) == told(plain.stdout)
