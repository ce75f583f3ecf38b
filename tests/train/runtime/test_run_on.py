"""Updates on the host run on after their step: what reads parameters or states waits for them, or hears of failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
from zerofx.runtime.tiers import tiers

SECONDS = 30.0  # until a test that waits for nothing is over
NAME = "tokens.weight"
Tensors = dict[str, Tensor]
Action = Callable[[zerofx.Step, tuple[Any, ...], Path], Tensors]
run_update = tiers._run_update


def under_way(step: zerofx.Step) -> bool:
    """Whether updates of the last step are still under way."""
    assert step._steps.tiers is not None
    return any(left.update is not None and not left.update.done() for left in step._steps.tiers._running_on.values())


class Host:
    """The host's lane, which a test holds back, or has fail."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.seconds = 0.0  # that each update takes longer
        patched.setattr(tiers, "_run_update", self)

    def __call__(self, bucket: int, function: Callable[[list[Any]], object], *args: Any) -> None:
        assert self.free.wait(SECONDS)
        time.sleep(self.seconds)

        def fail(_: list[Any]) -> None:
            raise FloatingPointError("the host cannot")

        run_update(bucket, fail if self.fails else function, *args)

    def step(self, step: zerofx.Step, args: tuple[Any, ...], *, fails: bool = False) -> None:
        """Run a step, whose updates are still under way when it has ended, and for a while after that."""
        step.flush()
        self.free.clear()
        step(*args)
        assert under_way(step), "the step has ended, and its updates have not"
        self.fails = fails
        threading.Timer(0.2, self.free.set).start()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def make(**options: Any) -> tuple[zerofx.Step, tuple[Any, ...]]:
    """A step whose buckets are all updated on the host, in bf16, so that their parameters are hidden between steps."""
    plan = placing(prepare_case(CASES["gpt"], 0, 1, precision="bf16"), "host", "host")
    return step_of("gpt", plan=plan, precision="bf16", **options)


@pytest.fixture(scope="module")
def states() -> list[Tensors]:
    """The model's state after each of some steps, every one of which is waited for."""
    step, args = make()
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
    with step.full(NAME) as value:
        return {NAME: value.clone()}


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
    numel = sum(bucket.numel for bucket in step._steps.taken.layout.buckets)
    assert step.tiers()["host"] == 12 * numel
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


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_what_reads_the_state_waits_for_updates(
    action: Action, host: Host, states: list[Tensors], tmp_path: Path
) -> None:
    step, args = make()
    step(*args)
    host.step(step, args)
    found = action(step, args, tmp_path)
    for name, value in found.items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_what_reads_the_state_hears_of_an_update_that_failed(action: Action, host: Host, tmp_path: Path) -> None:
    step, args = make()
    step(*args)
    host.step(step, args, fails=True)
    if action is _closed:
        with pytest.warns(UserWarning, match="lost are the model's parameters .*the host cannot"):
            step.close()
        return
    with pytest.raises(TierError, match=r"expected the update of bucket \d+ .*FloatingPointError: the host cannot"):
        action(step, args, tmp_path)
    with pytest.raises(TierError, match="the host cannot"):
        step(*args)
    with pytest.warns(UserWarning, match="the host cannot"):
        step.close()


def test_the_next_step_waits_for_updates_bucket_by_bucket(host: Host, states: list[Tensors]) -> None:
    step, args = make()
    host.seconds = 0.05
    for _ in range(4):
        step(*args)
        assert under_way(step)
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, states[3][name]), name


def test_the_next_step_hears_of_an_update_that_failed_and_computes_nothing_with_it(host: Host) -> None:
    step, args = make()
    step(*args)
    host.step(step, args, fails=True)
    for _ in range(2):
        with pytest.raises(TierError, match="the host cannot"):
            step(*args)
    assert step.num_steps == 2
    with pytest.warns(UserWarning, match="the host cannot"):
        step.close()


def test_a_measured_step_holds_what_was_planned(host: Host, states: list[Tensors]) -> None:
    step, args = make()
    step(*args)
    found = step.measure(*args, num_steps=3)
    check_measured(found, step.plan, args[0].nbytes)
    assert found.peak_bytes["host"] == step.plan.peak_bytes["host"]
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, states[3][name]), name


def test_parameters_that_users_see_are_there_when_a_step_has_ended() -> None:
    step, args = step_of("gpt", plan=placing(prepare_case(CASES["gpt"], 0, 1), "host", "host"))
    step(*args)
    seen = {name: value.clone() for name, value in step.model.state_dict().items()}
    for name, value in step.full_state_dict().items():
        assert torch.equal(value, seen[name]), name
