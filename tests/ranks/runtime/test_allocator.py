"""Memory that a CPU step frees stays for its next use: counted in page faults, in processes of their own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.lib.distributed import PATIENCE_SECONDS
from zerofx.codegen.cpu.allocator import keep_freed_memory

PROGRAM = """
import json, resource
import torch
from torch import nn
import zerofx

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
step = zerofx.compile(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda out, x: out.square().mean(), backend="eager"
)
x = torch.randn(16384, 64)  # activations of 4 MiB

def usage():
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_minflt, found.ru_maxrss

# Where the C library puts a block depends on the ones before: some steps go by until it has pages for all of them.
for _ in range(30):
    step(x)
before = usage()
losses = [float(step(x)) for _ in range(60)]
after = usage()
resident = int(open("/proc/self/statm").read().split()[1])
step.close()
print(json.dumps({
    "faults": after[0] - before[0], "grown": after[1] - before[1], "losses": losses,
    "given_back": (resident - int(open("/proc/self/statm").read().split()[1])) * resource.getpagesize(),
}))
"""


def run(**switches: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | switches,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the page faults of Linux")
def test_a_step_finds_the_memory_that_the_last_one_freed() -> None:
    kept, given_back = run(ZEROFX_KEEP_FREED="1"), run()
    assert kept["losses"] == given_back["losses"]
    assert kept["faults"] * 5 < given_back["faults"], (kept, given_back)
    assert kept["grown"] < 16 * 1024, "the resident set does not grow from step to step: these are four activations"
    assert kept["given_back"] > 8 * 2**20, "a closed step keeps nothing"


def test_it_is_left_alone_where_the_c_library_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
    assert torch.ones(2**20).sum() == 2**20
