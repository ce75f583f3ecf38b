"""Runs: they go on from where they were, leave in order when a signal comes, and survive a killed process."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.lib.checkout import ROOT
from tests.lib.distributed import PATIENCE_SECONDS, run_ranks, start_ranks
from tests.lib.models import CASES, Case, batches
from tests.lib.runs.training import build, world
from zerofx import UsageError
from zerofx.disk.checkpoint.folder import latest
from zerofx.disk.checkpoint.reader import CheckpointReader

MOST_STEPS = 2000  # that there are batches for


class Position:
    """Where a run is in its data."""

    def __init__(self, case: Case, num_batches: int) -> None:
        self._given = list(batches(case, world()[0], num_batches))
        self.place = 0

    def __next__(self) -> Any:
        self.place += 1
        return self._given[self.place - 1][0]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def start(folder: Path | str, **options: Any) -> tuple[zerofx.Run, Position]:
    case = CASES["dropout"]
    model = build(case)
    torch.manual_seed(world()[0])
    step = zerofx.compile(model, case.optimizer(model), backend="eager")
    position = Position(case, MOST_STEPS)
    return zerofx.Run(step, folder, state={"position": position}, **options), position


def train(run: zerofx.Run, position: Position, total: int) -> list[float]:
    return [float(run.step(*next(position))) for _ in run.steps(total)]


def test_a_run_goes_on_from_its_latest_checkpoint(tmp_path: Path) -> None:
    whole = train(*start(tmp_path / "whole"), 12)
    run, position = start(tmp_path / "parts", every=3, keep=2)
    assert run.resumed_from is None and train(run, position, 7) == whole[:7]
    assert sorted(p.name for p in (tmp_path / "parts").glob("step*")) == ["step-00000006", "step-00000007"]
    again, position = start(tmp_path / "parts", every=3, keep=2)
    assert again.resumed_from is not None and again.resumed_from.name == "step-00000007" and position.place == 7
    assert train(again, position, 12) == whole[7:]
    done, position = start(tmp_path / "parts")
    assert train(done, position, 12) == [] and not done.stopped


def test_a_run_goes_on_from_what_was_saved_asynchronously(tmp_path: Path) -> None:
    whole = train(*start(tmp_path / "whole"), 12)
    run, position = start(tmp_path / "parts", every=1, keep=2, asynchronous=True)
    assert train(run, position, 7) == whole[:7] and not run.step.is_saving
    assert sorted(p.name for p in (tmp_path / "parts").glob("*step*")) == ["step-00000006", "step-00000007"]
    again, position = start(tmp_path / "parts", every=1, keep=2, asynchronous=True)
    assert train(again, position, 12) == whole[7:]
    assert sorted(p.name for p in (tmp_path / "parts").glob("*step*")) == ["step-00000011", "step-00000012"]


def test_a_loop_that_runs_no_step_is_told(tmp_path: Path) -> None:
    run, _ = start(tmp_path)
    with pytest.raises(UsageError, match=r"call step\(batch\) there"):
        list(run.steps(3))
    for options in ({"every": 0}, {"keep": 1.5}):
        with pytest.raises(UsageError, match="or a whole number above 0"):
            start(tmp_path, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    run, position = start(tmp_path)
    for step in run.steps(20):
        run.step(*next(position))
        if step == 4:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # torchrun passes on what a terminal has sent, too
    assert run.stopped and run.step.num_steps == 4 and signal.getsignal(number) is before
    assert start(tmp_path)[1].place == 4


def test_a_handler_that_is_not_pythons_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that Python is embedded in may have handlers of its own: Python gives None for them, and takes none."""
    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_DFL, signal.SIGTERM: None}

    def put(number: int, handler: Any) -> Any:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before, handlers[number] = handlers[number], handler
        return before

    monkeypatch.setattr(signal, "getsignal", handlers.__getitem__)
    monkeypatch.setattr(signal, "signal", put)
    run, position = start(tmp_path)
    for _ in run.steps(1):
        assert handlers[signal.SIGINT] == run._note
        run.step(*next(position))
    assert handlers == {signal.SIGINT: signal.SIG_DFL, signal.SIGTERM: None}


def test_a_second_interruption_later_on_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerofx.session.run._SAME_REQUEST_SECONDS", -1.0)
    run, position = start(tmp_path)

    def interrupted_twice() -> None:
        for _ in run.steps(5):
            run.step(*next(position))
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()


def _stopped_on_one_rank(folder: str) -> tuple[bool, int, str]:
    run, position = start(folder)
    for number in run.steps(30):
        run.step(*next(position))
        if number == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    return run.stopped, run.step.num_steps, str(latest(Path(folder)))


@pytest.mark.days(3)
def test_a_signal_on_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    first, second = run_ranks(_stopped_on_one_rank, 2, str(tmp_path))
    assert first == second and first[0] and 2 <= first[1] < 12


SCRIPT = """
import os, signal, sys, torch, zerofx
from tests.ranks.checkpoints.test_run import start
from tests.lib.runs.training import world
import torch.distributed as dist
dist.init_process_group("gloo")
open(f"{sys.argv[1]}.of-{os.getppid()}-is-{os.getpid()}", "w").close()
run, position = start(sys.argv[1], every=int(sys.argv[3]), keep=2)
losses = open(f"{sys.argv[1]}.{world()[0]}.losses", "a")
for number in run.steps(int(sys.argv[2])):
    loss = float(run.step(*next(position)))
    print(number, loss.hex(), world()[1], file=losses, flush=True)
    if len(sys.argv) > 4 and number == int(sys.argv[4]) and world()[0] == 1 and run.resumed_from is None:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def command(folder: Path, *args: object, torchrun: tuple[str, ...]) -> list[str]:
    """`torchrun` of a script that trains; `args`: how many steps, how many between checkpoints, after which to kill."""
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    where = () if "--rdzv-backend" in torchrun else ("--standalone",)
    return [
        sys.executable, "-m", "torch.distributed.run", *where, *torchrun, str(script), str(folder), *map(str, args)
    ]  # fmt: skip


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Each start of the workers gets a store of its own (docs/checkpoints.md).
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(paths)}


def losses(folder: Path, rank: int = 0) -> dict[int, tuple[str, str]]:
    """The loss of each step, and how many ranks there were, as done last."""
    lines = (folder.parent / f"{folder.name}.{rank}.losses").read_text().splitlines()
    return {int(number): (loss, ranks) for number, loss, ranks in map(str.split, lines)}


def run_script(call: list[str]) -> str:
    done = subprocess.run(
        call, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_torchrun_goes_on_by_itself_after_a_rank_was_killed(tmp_path: Path) -> None:
    two = ("--nproc-per-node", "2", "--max-restarts", "1")
    run_script(command(tmp_path / "killed", 8, 2, 5, torchrun=two))
    run_script(command(tmp_path / "whole", 8, 2, torchrun=two))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    # And then with three, and with one.
    run_script(command(tmp_path / "killed", 9, 2, torchrun=("--nproc-per-node", "3")))
    run_script(command(tmp_path / "killed", 10, 2, torchrun=("--nproc-per-node", "1")))
    assert [ranks for _, ranks in losses(tmp_path / "killed").values()] == ["2"] * 8 + ["3", "1"]


@contextmanager
def node(folder: Path, num_ranks: int, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node of one or two, with so many ranks, while open."""
    # The first node has the store of the rendezvous. One that is taken for gone, and is only slow, trains on alone.
    soon = f"is_host={num_ranks > 1},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=15"
    elastic = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", soon)
    more = ("--local-addr", "localhost", "--max-restarts", "3", "--nproc-per-node", str(num_ranks))
    with open(folder.parent / f"node-of-{num_ranks}.log", "ab") as log:
        call = command(folder, MOST_STEPS, 1, torchrun=(*elastic, *more))
        process = subprocess.Popen(call, env=environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        kill_node(folder, process)


def kill_node(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill `torchrun` and its workers."""
    process.kill()
    process.wait()
    for worker in folder.parent.glob(f"{folder.name}.of-{process.pid}-is-*"):
        with suppress(ProcessLookupError):
            os.kill(int(worker.name.rpartition("-")[2]), signal.SIGKILL)


def wait_for_step(folder: Path, num_ranks: int, after: int) -> int:
    """Wait until a step after number `after` has been done by so many ranks; returns its number."""
    deadline = time.monotonic() + PATIENCE_SECONDS / 2
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            done = [number for number, (_, ranks) in losses(folder).items() if ranks == str(num_ranks)]
            if done and max(done) > after:
                return max(done)
        time.sleep(0.1)
    logs = "".join(path.read_text() for path in folder.parent.glob("*.log"))
    raise AssertionError(f"no step of {num_ranks} ranks after {after}:\n{logs[-6000:]}")


@pytest.mark.slow
def test_torchrun_goes_on_with_three_ranks_when_a_node_is_gone_and_with_four_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    with node(folder, 3, endpoint) as three:
        with node(folder, 1, endpoint):
            first = wait_for_step(folder, 4, after=1)
        second = wait_for_step(folder, 3, after=first)
        with node(folder, 1, endpoint):
            third = wait_for_step(folder, 4, after=second)
            assert three.poll() is None and third > second > first
    assert _check_whole(folder) >= third - 1


def _check_whole(folder: Path) -> int:
    """The latest checkpoint is whole to the bit; returns its step, 0 where none has been finished."""
    place = latest(folder)
    if place is None:
        return 0
    reader = CheckpointReader(place)
    reader.verify(0, 1)
    return reader.marker.num_steps


def _train_and_log(folder: str, total: int, asynchronous: bool) -> None:
    """Train up to step `total`, with a checkpoint after each, and a line for each step next to the folder."""
    run, position = start(folder, every=1, keep=2, asynchronous=asynchronous)
    with open(f"{folder}.{world()[0]}.losses", "a") as log:
        for number in run.steps(total):
            print(number, float(run.step(*next(position))).hex(), world()[1], file=log, flush=True)
    run.step.close()


def _lines(folder: Path) -> int:
    log = folder.parent / f"{folder.name}.0.losses"
    return log.read_text().count("\n") if log.exists() else 0


def _kill_at_random(tmp_path: Path, num_kills: int, num_ranks: int) -> None:
    """A run that is killed again and again has, in the end, the bits of one that was not."""
    draw = random.Random(5)
    folder, reached = tmp_path / "killed", 0
    for kill in range(num_kills):
        (tmp_path / f"meet-{kill}").mkdir()
        before = _lines(folder)
        about = (str(folder), MOST_STEPS, kill % 2 == 1)
        ranks = start_ranks(_train_and_log, num_ranks, tmp_path / f"meet-{kill}", *about)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _lines(folder) == before:  # until it trains, and saves after each step
            assert all(process.is_alive() for process in ranks) and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        for process in draw.sample(ranks, num_ranks):
            process.kill()
        for process in ranks:
            process.join()
        step = _check_whole(folder)
        assert reached <= step < MOST_STEPS
        reached = step
    run_ranks(_train_and_log, num_ranks, str(folder), reached + 2, False)
    run_ranks(_train_and_log, num_ranks, str(tmp_path / "whole"), reached + 2, False)
    assert losses(folder) == losses(tmp_path / "whole") and _check_whole(folder) == reached + 2
    assert len(list(folder.iterdir())) == 3  # two checkpoints that are kept, and the name of the latest


def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    _kill_at_random(tmp_path, 10, 1)


@pytest.mark.slow
def test_a_hundred_kills_of_two_ranks_at_random_moments(tmp_path: Path) -> None:
    _kill_at_random(tmp_path, 100, 2)


@pytest.mark.slow
def test_the_example_is_resumed_with_other_processes(tmp_path: Path) -> None:
    example = [str(ROOT / "examples" / "train_gpt.py"), "--backend", "eager", "--resume", str(tmp_path / "run")]
    more = ["--global-batch", "32", "--every", "1"]
    run_script([sys.executable, *example, *more, "--steps", "2"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "going on from" in run_script([*torchrun, *example, *more, "--steps", "3"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line.get("step", line.get("resumed_from")) for line in lines] == [2, "step-00000002", 3]
