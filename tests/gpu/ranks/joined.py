"""Several ranks joined by NCCL, on a GPU each, or on one GPU: from version 2.30 on, where it is asked to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lib.distributed import run_ranks

T = TypeVar("T")

NEEDED = (2, 30)
# One communicator's kernel takes as few of the card's multiprocessors as it can; several ranks have no multicast.
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def nccl_at_run_time() -> tuple[int, int]:
    """The version of the NCCL that this process has loaded, which may not be the one that torch was built with."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value % 10_000 // 100


def skip_without(num_ranks: int = 2) -> None:
    """Skip a test, with the reason, where there are fewer GPUs than ranks, and one GPU cannot have several."""
    if nccl_at_run_time() < NEEDED and torch.cuda.device_count() < num_ranks:
        found = ".".join(map(str, nccl_at_run_time()))
        pytest.skip(
            f"{num_ranks} ranks need as many GPUs, found {torch.cuda.device_count()}, or NCCL "
            f"{'.'.join(map(str, NEEDED))} or later, found {found} (0.0: none): preload another with "
            f"LD_PRELOAD=/path/libnccl.so.2"
        )


@contextlib.contextmanager
def settings(device: str) -> Iterator[None]:
    """The environment that ranks on ``device`` start with."""
    with mock.patch.dict(os.environ, SETTINGS if device == "cuda" else {}):
        yield


def join(device: str, folder: str, num_ranks: int | None = None, rank: int | None = None) -> None:
    """Have this rank's default group be one of NCCL's, and its device one of its own, or ``cuda:0`` where there are too
    few; on a CPU nothing changes."""
    if device != "cuda":
        return
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if rank is None else (rank, num_ranks)
    dist.destroy_process_group()
    assert rank is not None and num_ranks is not None
    torch.cuda.set_device(rank if torch.cuda.device_count() >= num_ranks else 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=Path(folder, "of the card").as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )


def _on_the_card(fn: Callable[..., T], device: str, folder: str, args: tuple[Any, ...]) -> T:
    join(device, folder)
    return fn(torch.device(device), *args)


def run_on_one_card(fn: Callable[..., T], num_ranks: int, device: str, *args: Any) -> list[T]:
    """``run_ranks(fn, num_ranks, device, *args)``, with ranks on GPUs, or one GPU, where ``device`` is ``"cuda"``."""
    with settings(device), tempfile.TemporaryDirectory() as folder:
        return run_ranks(_on_the_card, num_ranks, fn, device, folder, args, timeout=120.0)
