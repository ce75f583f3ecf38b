"""What some ranks have kept and others have not: all train the same bits, with what was kept where all can use it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import Trained, differences, step_of, train_compiled
from zerofx import RankMismatchError
from zerofx.capture.by_layer import by_layer
from zerofx.capture.trace import capture_forward
from zerofx.driver import driver
from zerofx.lowering.load import build

pytestmark = pytest.mark.captures


def _captures() -> contextlib.AbstractContextManager[mock.Mock]:
    return mock.patch.object(by_layer, "capture_forward", side_effect=capture_forward)


def _builds() -> contextlib.AbstractContextManager[mock.Mock]:
    return mock.patch.object(driver, "build", side_effect=build)


def _counted_in_turn(
    counting: Callable[[], contextlib.AbstractContextManager[mock.Mock]], turns: Sequence[Sequence[str | None]]
) -> tuple[list[int], list[str]]:
    """The calls that ``counting`` counts on this rank in each turn, and what of later turns is unlike the first.

    ``turns``: in each the folder of each rank's cache, None for no cache.
    """
    counts, trained = list[int](), list[Trained]()
    for folders in turns:
        os.environ["ZEROFX_CACHE_DIR"] = folders[dist.get_rank()] or "0"
        with counting() as calls:
            trained.append(train_compiled(CASES["stack"], 3, 2))
        counts.append(calls.call_count)
    return counts, [line for later in trained[1:] for line in differences(trained[0], later)]


@pytest.mark.slow
def test_ranks_of_which_one_has_a_kept_graph_train_the_same_bits(tmp_path: Path) -> None:
    folder = str(tmp_path)
    turns = [(None, None), (folder, None), (None, folder)]
    assert run_ranks(_counted_in_turn, 2, _captures, turns) == [([1, 1, 1], []), ([1, 1, 0], [])]


@pytest.mark.slow
def test_ranks_take_what_they_have_kept_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = f"{tmp_path}/0", f"{tmp_path}/1"
    turns = [(None, None), (first, None), (first, second), (first, second)]
    assert run_ranks(_counted_in_turn, 2, _builds, turns) == [([1, 1, 1, 0], [])] * 2


def _shared_twice(folder: str) -> tuple[list[tuple[str, str, str, str]], int, str]:
    """What is seen of two starts of ranks that share a model, how often it was built, and of one with other batches."""
    os.environ["ZEROFX_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    options: dict[str, Any] = {"mesh": {"model": 2}, "machine": SHARING}
    (((ids, targets), _),) = batches(CASES["gpt"], 0, 1)
    found = []
    with _builds() as count:
        for _ in range(2):
            step, _ = step_of("gpt", 3, **options)
            step(ids, targets)
            found.append((step.plan.to_json(), step.source, str(step.schedule()), str(step.stages[-1].text)))
            step.close()
        step, _ = step_of("gpt", 3, **options)
        with pytest.raises(RankMismatchError) as raised:
            step.prepare(ids, (targets + dist.get_rank()) % 19)
        step.close()
        return found, count.call_count, str(raised.value)


@pytest.mark.days(3)
def test_ranks_that_share_a_model_take_what_they_have_kept(tmp_path: Path) -> None:
    for (first, second), num_built, refused in run_ranks(_shared_twice, 2, str(tmp_path)):
        assert first == second and num_built == 1 and "gather_values" in first[2]
        assert "expected the same batch on ranks 0, 1" in refused
