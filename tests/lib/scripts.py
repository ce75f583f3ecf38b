"""Run scripts as `python` and torchrun do, in processes that need not import torch first."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.lib.distributed import PATIENCE_SECONDS, begin, environment_of_ranks, forked, run_to_their_end


@contextlib.contextmanager
def environments_by_rank(num_ranks: int, num_nodes: int = 1) -> Iterator[list[dict[str, str]]]:
    """The environment of each of some ranks on this machine, as torchrun makes it on ``num_nodes``; while open, they
    meet in a store of this process."""
    of_node = num_ranks // num_nodes
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # public
    common = {
        **environment_of_ranks(), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(of_node),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank % of_node)} for rank in range(num_ranks)]


def run_script(script: Path, *options: str, num_ranks: int = 1, num_nodes: int = 1) -> str:
    """What a script prints, alone or on several ranks and nodes; fails with all of it if one of them ends in an error.

    Each rank is the main program of a process that is forked from one that has only imported modules.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        printed = Path(folder, "printed")
        environments = [environment_of_ranks()]
        if num_ranks > 1:
            environments = stack.enter_context(environments_by_rank(num_ranks, num_nodes))
        ranks = [
            forked(script.name, _main, str(script), options, str(printed), environment) for environment in environments
        ]
        in_time = run_to_their_end(ranks, PATIENCE_SECONDS)
        text = printed.read_text(encoding="utf-8")
        assert in_time and not any(process.exitcode for process in ranks), text
        return text


def _main(script: str, options: tuple[str, ...], printed: str, environment: dict[str, str]) -> None:
    begin(environment)
    # All of them add to the end of one file, as to one terminal.
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process that was forked off ends without
