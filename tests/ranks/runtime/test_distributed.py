"""The helper that the distributed tests stand on."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.lib.distributed import RankError, run_ranks


class _OwnError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first + second)  # cannot be rebuilt from its arguments


def _sum(value: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return dist.get_rank(), total


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the key")
    dist.barrier()


def _raise_own() -> None:
    raise _OwnError(1, 2)


def _crash() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    time.sleep(60)


def _hang() -> None:
    time.sleep(60)


def _warn() -> None:
    warnings.warn("as in the parent", UserWarning, stacklevel=1)


def _ranks_left() -> list[str]:
    """Ranks that have not ended; other tests may have left processes of a pool, for the tests to come."""
    return [child.name for child in multiprocessing.active_children() if child.name.startswith("rank ")]


def test_results_come_by_rank() -> None:
    results = run_ranks(_sum, 2, 10.0)
    assert [rank for rank, _ in results] == [0, 1]
    assert [total.item() for _, total in results] == [30.0, 30.0]


def test_first_error_is_raised_again_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="the key") as caught:
        run_ranks(_fail_on_one, 2)
    assert "_fail_on_one" in "".join(caught.value.__notes__)
    assert not _ranks_left()


def test_error_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(RankError, match="_OwnError: 3"):
        run_ranks(_raise_own, 1)


def test_crash_ends_all_ranks() -> None:
    with pytest.raises(RankError, match=r"0: 7"):
        run_ranks(_crash, 2)
    assert not _ranks_left()


def test_hang_ends_after_timeout() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] of 1 did not end within 2 s"):
        run_ranks(_hang, 1, timeout=2.0)
    assert not _ranks_left()


def test_warnings_are_errors_in_ranks_too() -> None:
    with pytest.raises(UserWarning, match="as in the parent"):
        run_ranks(_warn, 1)
