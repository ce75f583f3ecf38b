"""Process groups of a step's own, from its first step to ``close``, and where a rank is gone by then."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.lib.distributed import RankError, run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.training import build
from tests.lib.runs.tuning import tune
from tests.lib.users import adamw, ids, tiny
from zerofx.driver import driver
from zerofx.errors import MemoryBudgetError, RankMismatchError, UsageError, ZeroFXError
from zerofx.tuning import trial

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
    warnings.simplefilter("ignore", UserWarning)  # what is lost with rank 1 is told, too
    with pytest.raises(RankMismatchError, match="close the step"):
        second.close()
    seconds = time.monotonic() - began
    Path(path).write_text(json.dumps({"sockets": counts, "total": total.item(), "seconds": seconds}))
    os._exit(0)


@pytest.mark.days(3)
def test_close_destroys_the_groups_of_a_step_alone_and_does_not_wait_for_a_rank_that_has_died(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with pytest.raises(RankError, match=r"exit codes by rank.*{0: 0, 1: 0}"):
        run_ranks(_close_and_lose_a_rank, 2, str(path))
    found = json.loads(path.read_text())
    before, during, after = found["sockets"]
    assert during > before and after == before
    assert found["total"] == 2.0, "the user's own group is as it was"
    assert found["seconds"] < 30


BATCH = {"ids": ids(), "labels": ids(9)}
NO_BATCH = {"ids": torch.zeros(2, 3, requires_grad=True)}


def _compile(**options: Any) -> zerofx.Step:
    model = tiny()
    return zerofx.compile(model, adamw(model), backend="eager", **{"example_batch": BATCH, **options})


def _alone(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stops rank 1 by what ``Control.attempt`` tells no other rank of."""
    if dist.get_rank() == 1:
        raise KeyboardInterrupt
    return outputs.square().mean()


class Failing(zerofx.Step):
    """A step that no batch can be prepared for."""

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Refuse it, on all ranks."""
        raise ZeroFXError("cannot be prepared")


def _tune_in_vain() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "Step", Failing)
        model = tiny()
        tune(model, adamw(model), BATCH, num_candidates=1)


REFUSED: dict[str, tuple[type[BaseException], Callable[[], object]]] = {
    "budget": (MemoryBudgetError, lambda: _compile(memory_budget=10, recompute="none", tile="none")),
    "batch": (UsageError, lambda: _compile(example_batch=NO_BATCH)),
    "options": (RankMismatchError, lambda: _compile(max_shapes=2 + dist.get_rank())),
    "weights": (ZeroFXError, lambda: _compile(weights="/nowhere")),
    "tune": (ZeroFXError, _tune_in_vain),
    "tune to a budget": (MemoryBudgetError, lambda: tune(model := tiny(), adamw(model), BATCH, memory_budget=1000)),
}


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _refused(names: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Threads and sockets behind each of some calls that are refused on all ranks."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in names:
        error, call = REFUSED[name]
        for _ in range(2):
            with pytest.raises(error):
                call()
            gc.collect()
            dist.barrier()
            found.setdefault(name, []).append((_num_threads(), _num_sockets()))
    return found


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "names",
    [["budget", "batch", "options", "weights"], pytest.param(["tune", "tune to a budget"], marks=pytest.mark.slow)],
    ids=str,
)
def test_what_is_refused_leaves_no_group_behind(names: list[str]) -> None:
    for found in run_ranks(_refused, 2, names):
        assert {name: counts for name, counts in found.items() if counts != counts[:1] * len(counts)} == {}


def _one_alone(where: str) -> tuple[str, float]:
    """What ends a rank, and after how long, where rank 1 is interrupted as it captures or builds a step."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if where == "build" and dist.get_rank() == 1:
            patch.setattr(driver, "_fit_budget", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises((KeyboardInterrupt, RankMismatchError)) as caught:
            _compile(loss_fn=_alone if where == "capture" else torch.sum, example_batch=(ids(),))
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


@pytest.mark.days(3)
@pytest.mark.parametrize("where", ["capture", "build"])
def test_a_rank_that_fails_alone_goes_at_once_and_the_others_do_not_wait(where: str) -> None:
    (zero, waited), (one, left) = run_ranks(_one_alone, 2, where)
    assert one.startswith("KeyboardInterrupt") and f"found that rank 1 was to {where} a step (KeyboardInter" in zero
    assert max(waited, left) < 60


def _one_bad_batch() -> tuple[str, float]:
    step = _compile(example_batch=None)
    if dist.get_rank() == 0:
        time.sleep(3)
    began = time.monotonic()
    with pytest.raises((UsageError, RankMismatchError)) as caught:
        step(**(BATCH if dist.get_rank() == 0 else NO_BATCH))
    step.abandon()
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def test_a_rank_that_comes_late_still_hears_why_another_has_left() -> None:
    (zero, waited), (one, left) = run_ranks(_one_bad_batch, 2)
    assert one.startswith("UsageError") and "rank 1: raise UsageError" in zero
    assert max(waited, left) < 2.5
