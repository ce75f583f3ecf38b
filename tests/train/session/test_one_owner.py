"""One thing at a time is done with a step: threads and signal handlers that come in between are refused."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.runs.pairs import compile_eager
from tests.lib.users import adamw, ids, same_parameters, tiny
from zerofx import Step, UsageError, ZeroFXWarning
from zerofx.session import step as step_module
from zerofx.session.batches.micro_batches import count_all

Call = Callable[[Step, Path], Any]


def _full_parameters(step: Step, _: Path) -> None:
    with step.full_parameters():
        pass


def _full(step: Step, _: Path) -> None:
    with step.full("head.weight"):
        pass


CALLS: dict[str, Call] = {
    "step": lambda step, _: step(ids(), labels=ids(1)),
    "evaluate": lambda step, _: step.evaluate(ids(), labels=ids(1)),
    "prepare": lambda step, _: step.prepare(ids(), labels=ids(1)),
    "flush": lambda step, _: step.flush(),
    "full_parameters": _full_parameters,
    "full": _full,
    "full_state_dict": lambda step, _: step.full_state_dict(),
    "save": lambda step, folder: step.save_checkpoint(folder),
    "load": lambda step, folder: step.load_checkpoint(folder),
    "state_dict": lambda step, _: step.state_dict(),
    "close": lambda step, _: step.close(),
}


def _built() -> Step:
    model = tiny()
    step = compile_eager(model, adamw(model), precision="bf16")
    step(ids(), labels=ids(1))
    return step


def _after_two_more() -> Step:
    step = _built()
    for _ in range(2):
        step(ids(), labels=ids(1))
    step.close()
    return step


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_is_refused_and_the_step_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _built()
    step.save_checkpoint(tmp_path)
    inside, over = threading.Event(), threading.Event()

    def waits(*args: Any) -> None:
        inside.set()
        assert over.wait(60)
        count_all(*args)

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "count_all", waits)
        running = threading.Thread(target=step, args=(ids(),), kwargs={"labels": ids(1)})
        running.start()
        assert inside.wait(60)
        try:
            with pytest.raises(UsageError, match="found that another thread is to run a step"):
                CALLS[name](step, tmp_path)
        finally:
            over.set()
            running.join(60)
    assert step.num_steps == 2
    with step.full_parameters():
        pass
    step(ids(), labels=ids(1))
    step.close()
    assert same_parameters(step.model, _after_two_more().model)


def test_a_signal_handler_that_steps_within_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step, refused = _built(), list[str]()

    def handler(*_: object) -> None:
        try:
            step(ids(), labels=ids(1))
        except UsageError as error:
            refused.append(str(error))

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        count_all(*args)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(step_module, "count_all", interrupted)
            step(ids(), labels=ids(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1 and "a signal handler or callback has interrupted this thread" in refused[0]
    step(ids(), labels=ids(1))
    step.close()
    assert same_parameters(step.model, _after_two_more().model)


def test_threads_that_capture_do_not_leave_the_step_inside_full_parameters() -> None:
    step, outcomes = _built(), list[str]()
    start = threading.Barrier(2)

    def prepare(rows: int) -> None:
        batch = torch.cat([ids()] * rows)
        start.wait()
        try:
            step.prepare(batch, labels=batch)
            outcomes.append("prepared")
        except UsageError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=prepare, args=(rows,)) for rows in (2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroFXWarning)  # batches of another shape, on other threads
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert "prepared" in outcomes and len(outcomes) == 2
    step(ids(), labels=ids(1))
    with step.full_parameters():
        pass
    step.close()


def test_a_block_is_left_whatever_another_thread_tries() -> None:
    step = _built()
    stop, refused = threading.Event(), list[str]()

    def hammer() -> None:
        while not stop.is_set():
            time.sleep(0.0005)
            try:
                step.flush()
            except UsageError as error:
                refused.append(str(error))

    thread = threading.Thread(target=hammer)
    thread.start()
    blocks = 0
    try:
        for _ in range(200):
            try:
                with step.full_parameters():
                    blocks += 1
            except UsageError:  # the other thread was at it
                continue
    finally:
        stop.set()
        thread.join(60)
    assert blocks
    step(ids(), labels=ids(1))
    step.close()
