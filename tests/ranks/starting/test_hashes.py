"""Plans are the same on every rank and in every run, whatever the environment of a process is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lib.checkout import ROOT
from tests.lib.distributed import PATIENCE_SECONDS
from tests.lib.hashes import planned_alone
from tests.lib.scripts import environments_by_rank

PATHS = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
ONE = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C", "TZ": "UTC", "UNRELATED": "one"}
OTHER = {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Tokyo", "UNRELATED": "2"}


def run_with(environments: Sequence[Mapping[str, str]], folder: Path) -> list[dict[str, Any]]:
    """What ``tests.lib.hashes`` writes on ranks with these environments, each a program of its own."""
    with environments_by_rank(len(environments)) as of_ranks:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.lib.hashes", str(folder)],
                env={**of_rank, "PYTHONPATH": PATHS, **environment},
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for of_rank, environment in zip(of_ranks, environments, strict=True)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(outputs)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(environments))]


@pytest.mark.days(3)
def test_environments_do_not_change_a_plan(tmp_path: Path) -> None:
    one, other = run_with([ONE, OTHER], tmp_path)
    # The environments did reach the processes.
    assert (one["mark"], one["threads"]) == ("one", 1) and (other["mark"], other["threads"]) == ("2", 2)
    assert one["hash of a word"] != other["hash of a word"]
    for what in ("planned alone", "compiled", "source", "graph"):
        assert one[what] == other[what], what
    assert one["compiled"] == one["planned alone"], "what is planned without ranks is what they run"
    # This process is another run, with an environment of its own.
    here = planned_alone()
    assert (here.decisions_hash(), here.graph) == (one["planned alone"], one["graph"])
