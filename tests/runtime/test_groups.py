"""Process groups of a step's own, from its first step to ``close``, and where a rank is gone by then."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.distributed import RankError, run_ranks
from tests.models import CASES, batches
from tests.training import build
from zerofx.errors import RankMismatchError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open sockets are counted in /proc")


def _num_sockets() -> int:
    """Connections of this process, which gloo has one of for each other rank and group."""
    return sum("socket:[" in os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())


def _stepped() -> zerofx.Step:
    case = CASES["stack"]
    model = build(case)
    step = zerofx.compile(model, case.optimizer(model), stage=3, backend="eager")
    args, _ = next(batches(case, dist.get_rank(), 1))
    step(*args)
    return step


def _close_and_lose_a_rank(path: str) -> None:
    users = dist.new_group(backend="gloo")
    dist.barrier(users)
    before = _num_sockets()
    first = _stepped()
    during = _num_sockets()
    first.close()
    first.close()
    counts = [before, during, _num_sockets()]
    total = torch.ones(1)
    dist.all_reduce(total, group=users)
    second = _stepped()
    if dist.get_rank() == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RankMismatchError, match="to close the step"):
        second.close()
    seconds = time.monotonic() - began
    Path(path).write_text(json.dumps({"sockets": counts, "total": total.item(), "seconds": seconds}))
    os._exit(0)


def test_close_destroys_the_groups_of_a_step_alone_and_does_not_wait_for_a_rank_that_has_died(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with pytest.raises(RankError, match=r"exit codes by rank.*{0: 0, 1: 0}"):
        run_ranks(_close_and_lose_a_rank, 2, str(path))
    found = json.loads(path.read_text())
    before, during, after = found["sockets"]
    assert during > before and after == before
    assert found["total"] == 2.0, "the user's own group is as it was"
    assert found["seconds"] < 30
