"""What a step leaves under way, on the host, a link or a drive, runs on after it: what reads parameters or states waits
for it, or hears of failures."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerofx
from tests.lib.models import CASES
from tests.lib.runs.offloads import check_measured, placing, prepare_case
from tests.lib.runs.training import step_of
from zerofx.errors import TierError
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Role
from zerofx.ir.streams import TO_HOST
from zerofx.runtime.tiers import tiers
from zerofx.runtime.tiers.copies import Copy, ThreadCopies
from zerofx.runtime.tiers.nvme import NvmeFiles, Stripe

pytestmark = pytest.mark.usefixtures("drive")

SECONDS = 30.0  # until a test that waits for nothing is over
Tensors = dict[str, Tensor]
Action = Callable[[zerofx.Step, tuple[Any, ...], Path], Tensors]
run_update, move = tiers._run_update, NvmeFiles._move

# The tier of states, and where they are updated: an update is left under way, or a copy, or a write.
Way = tuple[str, str]
UPDATED: Way = ("host", "host")
WAYS = [UPDATED, ("host", "device"), ("nvme", "host"), ("nvme", "device")]
FAILING = [UPDATED, ("nvme", "host"), ("nvme", "device")]
_name = "-".join


def under_way(step: zerofx.Step) -> bool:
    """Whether something of the last step may still be under way."""
    assert step._steps.tiers is not None
    return bool(step._steps.tiers._running_on)


class Lane:
    """The lane of what is left under way, which a test holds back, or has fail."""

    def __init__(self, way: Way, patched: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.seconds = 0.0  # that each update, copy or write takes longer
        lane = self

        class Links(ThreadCopies):
            def start(
                self, stream: str, source: Tensor, destination: Any, after: Callable[[], None] | None = None
            ) -> Copy:
                into: Any = _HeldBack(destination, lane) if stream == TO_HOST else destination
                return super().start(stream, source, into, after)

        def write(files: NvmeFiles, part: Stripe, flags: int, call: Any, view: memoryview, offset: int) -> int:
            if flags & os.O_WRONLY:
                lane.wait()
                if lane.fails:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return move(files, part, flags, call, view, offset)

        if way == UPDATED:
            patched.setattr(tiers, "_run_update", self._update)
        elif way[0] == "host":
            patched.setattr(tiers, "ThreadCopies", Links)
        else:
            patched.setattr(NvmeFiles, "_move", write)

    def wait(self) -> None:
        assert self.free.wait(SECONDS)
        time.sleep(self.seconds)

    def _update(self, bucket: int, function: Callable[[list[Any]], object], *args: Any) -> None:
        self.wait()

        def fail(_: list[Any]) -> None:
            raise FloatingPointError("the host cannot")

        run_update(bucket, fail if self.fails else function, *args)

    def step(self, step: zerofx.Step, args: tuple[Any, ...], *, fails: bool = False) -> None:
        """Run a step that has left something under way when it has ended, and for a while after that."""
        step.flush()
        self.free.clear()
        step(*args)
        assert under_way(step), "the step has ended, and what it has left has not"
        self.fails = fails
        threading.Timer(0.2, self.free.set).start()


class _HeldBack:
    """The destination of a copy that waits for its lane."""

    def __init__(self, tensor: Tensor, lane: Lane) -> None:
        self._tensor, self._lane = tensor, lane

    def copy_(self, source: Tensor) -> None:
        self._lane.wait()
        self._tensor.copy_(source)


def make(way: Way | None, **options: Any) -> tuple[zerofx.Step, tuple[Any, ...]]:
    """A step in bf16, so that its parameters are hidden between steps. All buckets are updated on the host, or the
    states of one go back to their tier after its update, which they may until the middle of the next forward."""
    prepared = prepare_case(CASES["gpt"], 0, 1, precision="bf16")
    if way is None:
        return step_of("gpt", plan=prepared.plan, precision="bf16", **options)
    plan = placing(prepared, *way, every=1 if way == UPDATED else len(prepared.plan.reduces))
    if way != UPDATED:
        (decision,) = plan.states
        read = [consumers(node)[0] for node in prepared.step.placeholders(Role.PARAMETER)]
        middle = sorted(read)[len(read) // 2]
        plan = plan.replace_absences(states=(replace(decision, back_by=middle.name),))
    return step_of("gpt", plan=plan, precision="bf16", **options)


@pytest.fixture
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lane:
    return Lane(request.getfixturevalue("way"), monkeypatch)


@pytest.fixture(scope="module")
def states() -> list[Tensors]:
    """The model's state after each of some steps, with all that is trained on the device."""
    step, args = make(None)
    found = []
    for _ in range(4):
        step(*args)
        found.append(step.full_state_dict())
    return found


def _flush(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    step.flush()
    assert not under_way(step)
    return step.full_state_dict()


def _shown(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    with step.full_parameters() as model:
        return {name: value.clone() for name, value in model.state_dict().items()}


def _one(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    assert step._steps.taken is not None
    name = step._steps.taken.layout.buckets[step.plan.states[0].bucket].slots[0].source
    with step.full(name) as value:
        return {name: value.clone()}


def _saved(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    step.save_checkpoint(folder)
    step(*args)
    step.load_checkpoint(folder)
    return step.full_state_dict()


def _saved_later(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    step.save_checkpoint(folder, asynchronous=True)
    step(*args)
    step.finish_saving()
    step.load_checkpoint(folder)
    return step.full_state_dict()


def _evaluated(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    found = step.evaluate(*args)
    assert not under_way(step)
    state = step.full_state_dict()
    assert torch.equal(found, step.evaluate(*args))
    return state


def _optimizer(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    step.optimizer.state_dict()
    assert not under_way(step)
    return step.full_state_dict()


def _counted(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    assert step._steps.taken is not None
    buckets = step._steps.taken.layout.buckets
    numel = sum(buckets[decision.bucket].numel for decision in step.plan.states)
    assert step.tiers()[step.plan.states[0].tier] == 12 * numel
    assert not under_way(step)
    return step.full_state_dict()


def _closed(step: zerofx.Step, args: tuple[Any, ...], folder: Path) -> Tensors:
    model = step.model
    step.close()
    return dict(model.state_dict())


ACTIONS: dict[str, Action] = {
    "flush": _flush,
    "full_state_dict": lambda step, args, folder: step.full_state_dict(),
    "full_parameters": _shown,
    "full": _one,
    "checkpoint": _saved,
    "checkpoint, written later": _saved_later,
    "evaluation": _evaluated,
    "optimizer's states": _optimizer,
    "tiers": _counted,
    "close": _closed,
}


by_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
by_way = pytest.mark.parametrize("way", WAYS, ids=_name)
by_failing = pytest.mark.parametrize("way", FAILING, ids=_name)


@pytest.mark.days(3)
@pytest.mark.sweep(8)
@by_action
@by_way
def test_what_reads_the_state_waits_for_what_is_under_way(
    action: Action, way: Way, lane: Lane, states: list[Tensors], tmp_path: Path
) -> None:
    step, args = make(way)
    step(*args)
    lane.step(step, args)
    found = action(step, args, tmp_path)
    for name, value in found.items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.days(3)
@pytest.mark.sweep(8)
@by_action
@by_failing
def test_what_reads_the_state_hears_of_what_has_failed(action: Action, way: Way, lane: Lane, tmp_path: Path) -> None:
    step, args = make(way)
    step(*args)
    lane.step(step, args, fails=True)
    if action is _closed:
        with pytest.warns(UserWarning, match=f"lost are the model's parameters .*{reason(way)}"):
            step.close()
        return
    with pytest.raises(TierError, match=reason(way)):
        action(step, args, tmp_path)
    with pytest.raises(TierError, match=reason(way)):
        step(*args)
    with pytest.warns(UserWarning, match=reason(way)):
        step.close()


def reason(way: Way) -> str:
    if way == UPDATED:
        return r"expected the update of bucket \d+ .*FloatingPointError: the host cannot"
    return r"expected to write bytes .*No space left on device"


@pytest.mark.sweep(2)
@by_way
def test_the_next_step_waits_where_it_reads_what_is_under_way(way: Way, lane: Lane, states: list[Tensors]) -> None:
    step, args = make(way)
    lane.seconds = 0.05
    for _ in range(4):
        step(*args)
        assert under_way(step)
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, states[3][name]), name


@by_failing
def test_the_next_step_hears_of_what_has_failed_and_computes_nothing_with_it(way: Way, lane: Lane) -> None:
    step, args = make(way)
    step(*args)
    lane.step(step, args, fails=True)
    for _ in range(2):
        with pytest.raises(TierError, match=reason(way)):
            step(*args)
    assert step.num_steps == 2
    with pytest.warns(UserWarning, match=reason(way)):
        step.close()


@pytest.mark.sweep(2)
@by_way
def test_a_measured_step_holds_what_was_planned(way: Way, states: list[Tensors]) -> None:
    step, args = make(way)
    step(*args)
    found = step.measure(*args, num_steps=3)
    check_measured(found, step.plan, args[0].nbytes)
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, states[3][name]), name


def test_parameters_that_users_see_are_there_when_a_step_has_ended() -> None:
    step, args = step_of("gpt", plan=placing(prepare_case(CASES["gpt"], 0, 1), "host", "host"))
    step(*args)
    seen = {name: value.clone() for name, value in step.model.state_dict().items()}
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, seen[name]), name
