"""A rank that ends between ``init_process_group`` and ``compile`` is named, also where the store goes with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

_SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist, zerofx
rank, gone = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
dist.barrier()
if rank == gone:
    os._exit(0)
time.sleep(1)
model = torch.nn.Linear(4, 1)
try:
    zerofx.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
except zerofx.RankMismatchError as error:
    print(error)
    os._exit(0)
"""


@pytest.mark.days(3)
@pytest.mark.parametrize("gone", [0, 1])
def test_who_is_gone_before_compile_is_named(gone: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ZEROFX_TIMEOUT": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(gone)], env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert f"expected all 2 ranks to call zerofx.compile within 3 s, but rank {gone} did not come" in outputs[1 - gone]
