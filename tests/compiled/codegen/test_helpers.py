"""Helper processes: each task is done once, and what they compile is found in the cache."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from zerofx.codegen.parallel.helpers import Helpers, Task, TensorLike, num_helpers

NO_KERNELS: frozenset[str] = frozenset()
READY = "import pickle, sys, time\nprint('ready', flush=True)\n"
SOURCE = """
import torch

aten = torch.ops.aten

def step(runtime, state, batch):
    pass

def doubled(inputs):
    (x,) = inputs
    inputs.clear()
    return (aten.add.Tensor(x, x),)
"""


def tasks(num_tasks: int) -> dict[str, Task]:
    inputs = [torch.ones(2, 3), 1.5]
    return {str(number): Task.of(SOURCE, "step.py", "doubled", inputs, NO_KERNELS) for number in range(num_tasks)}


def program(text: str) -> list[str]:
    return [sys.executable, "-c", READY + text]


def test_a_task_says_what_tensors_look_like_and_carries_scalars() -> None:
    assert tasks(1)["0"].inputs == (TensorLike((2, 3), (3, 1), torch.float32, "cpu"), 1.5)


def test_helpers_are_for_further_cores_and_regions_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    on_cpu, on_gpu = [torch.ones(1), 2.0], [torch.ones(1, device="meta")]
    assert [num_helpers([on_cpu] * count) for count in (1, 2, 3, 9)] == [0, 1, 2, 2]
    assert num_helpers([on_cpu, on_gpu, on_gpu]) == 0


def test_without_helpers_all_tasks_are_this_processs_in_order() -> None:
    with Helpers(tasks(3), 0) as helpers:
        assert list(helpers.keys()) == ["0", "1", "2"]


def test_tasks_done_soon_start_no_helper(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    with Helpers(tasks(2), 1, program(f"open({str(mark)!r}, 'w')")) as helpers:
        assert list(helpers.keys()) == ["0", "1"]
    assert not mark.exists()


def test_a_helper_takes_tasks_that_this_process_has_not_and_is_waited_for(tmp_path: Path) -> None:
    done = tmp_path / "done"
    text = (
        f"pickle.load(sys.stdin.buffer)\ntime.sleep(0.5)\nopen({str(done)!r}, 'w').close()\nprint('done', flush=True)"
    )
    with Helpers(tasks(2), 1, program(text), patience_seconds=0) as helpers:
        mine = helpers.keys()
        assert next(mine) == "0"
        deadline = time.monotonic() + 60
        while helpers._tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(mine) == []
    assert done.exists()


class SlowToSend:
    """An input that takes a while to pickle, and arrives as 0."""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        time.sleep(1)
        return int, ()


def test_a_task_that_is_still_being_sent_is_waited_for(tmp_path: Path) -> None:
    done = tmp_path / "done"
    given = {"here": tasks(1)["0"], "there": Task(SOURCE, "step.py", "doubled", (SlowToSend(),), 1, NO_KERNELS)}
    text = f"pickle.load(sys.stdin.buffer)\nopen({str(done)!r}, 'w').close()\nprint('done', flush=True)"
    with Helpers(given, 1, program(text), patience_seconds=0) as helpers:
        assert next(helpers.keys()) == "here"
        deadline = time.monotonic() + 60
        while helpers._tasks and time.monotonic() < deadline:
            time.sleep(0.01)
    assert done.exists()


@pytest.mark.parametrize("text", ["sys.exit(1)", "pickle.load(sys.stdin.buffer); sys.exit(1)"])
def test_a_helper_that_dies_holds_nobody_up(text: str) -> None:
    with Helpers(tasks(3), 1, program(text), patience_seconds=0) as helpers:
        for _ in helpers.keys():  # noqa: SIM118 - no mapping: keys are handed out once
            time.sleep(0.3)


def test_an_error_here_does_not_wait_for_helpers() -> None:
    def fail() -> None:
        with Helpers(tasks(2), 1, program("time.sleep(600)"), patience_seconds=0) as helpers:
            next(helpers.keys())
            time.sleep(0.5)
            raise ValueError("a region could not be compiled")

    began = time.monotonic()
    with pytest.raises(ValueError, match="could not be compiled"):
        fail()
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_helper_compiled_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._dynamo.utils import counters

    from zerofx.codegen.inductor.compile import compile_region
    from zerofx.codegen.source import load_source

    # No inputs that are not tensors: a traced function's scalars are read as they are.
    given = {"only": Task.of(SOURCE, "step.py", "doubled", [torch.ones(5, 7)], NO_KERNELS)}
    with Helpers(given, 1, patience_seconds=0) as helpers:
        deadline = time.monotonic() + 300
        while helpers._tasks and time.monotonic() < deadline:
            time.sleep(0.1)
    before = counters["inductor"]["fxgraph_cache_hit"]
    compiled = compile_region(load_source(SOURCE, "step.py")["doubled"], [torch.ones(5, 7)], "doubled")
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1
    (found,) = compiled.call([torch.full((5, 7), 3.0)])
    assert torch.equal(found, torch.full((5, 7), 6.0))
