"""One rank of several without the others: torch's fake process group, whose collectives move nothing, and a control
channel that answers for all. What is allocated and launched is as on a rank; values are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerofx.runtime.comm import collectives
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.nccl import Nccl
from zerofx.session import life


class _ForAll(Control):
    """Rank 0 of ranks that all say what it says."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        super().__init__(None, timeout_seconds)
        self.num_ranks = dist.get_world_size(group)

    def start(self, *args: Any, note: bytes = b"", check: Any = None, **kwargs: Any) -> Callable[[], Sequence[bytes]]:
        notes = [note.ljust(32, b"\0")] * self.num_ranks
        if check is not None:
            check(notes)
        return lambda: notes

    def gather(self, value: Any, purpose: str) -> list[Any]:
        return [value] * self.num_ranks


@contextlib.contextmanager
def one_rank_of(num_ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``num_ranks``, whose steps run ``Nccl`` on a device of either kind."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(life, "Control", _ForAll)
            patched.setattr(collectives, "make_gloo_transport", lambda group, log, _timeout, **_: Nccl(group, CPU, log))
            patched.setattr(collectives, "gloo_over", lambda group, _timeout: group)
            yield
    finally:
        dist.destroy_process_group()


CPU = torch.device("cpu")
