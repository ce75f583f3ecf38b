"""Steps in the background: in order, each once, and none after one that fails or while they are stopped."""

from __future__ import annotations

import threading

from zerofx.codegen.inductor.background import Background


def test_steps_are_done_in_order_and_those_they_append_behind_them() -> None:
    done: list[int] = []
    background = Background("test")

    def first() -> None:
        done.append(1)
        background.append(lambda: done.append(2))

    background.append(first)
    background.append(lambda: done.append(3))
    assert background.wait() is None
    assert sorted(done) == [1, 2, 3] and done[0] == 1


def test_nothing_is_begun_while_stopped_and_the_rest_after() -> None:
    done: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_end.wait()

    background = Background("test", [wait, lambda: done.append(1)])
    background.resume()
    assert begun.wait(60)
    background.stop()
    may_end.set()
    assert background.wait() is None
    assert done == []
    assert not any(thread.name == "test" and thread.is_alive() for thread in _others())
    background.resume()
    assert background.wait() is None
    assert done == [1]


def _others() -> list[threading.Thread]:
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(60)
    return threading.enumerate()


def test_after_a_step_that_fails_none_is_done() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no compiler")

    background = Background("test", [fail, lambda: done.append(1)])
    background.resume()
    assert isinstance(background.wait(), ValueError)
    background.append(lambda: done.append(2))
    assert isinstance(background.wait(), ValueError)
    background.resume()
    background.wait()
    assert done == []
