"""Steps beside this process: in order, each once, and none after one that fails or while they are stopped."""

from __future__ import annotations

import threading

from zerofx.codegen.parallel.beside import Beside


def test_steps_are_done_in_order_and_those_they_append_behind_them() -> None:
    done: list[int] = []
    beside = Beside("test")

    def first() -> None:
        done.append(1)
        beside.append(lambda: done.append(2))

    beside.append(first)
    beside.append(lambda: done.append(3))
    assert beside.wait() is None
    assert sorted(done) == [1, 2, 3] and done[0] == 1


def test_nothing_is_begun_while_stopped_and_the_rest_after() -> None:
    done: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_end.wait()

    beside = Beside("test", [wait, lambda: done.append(1)])
    beside.resume()
    assert begun.wait(60)
    beside.stop()
    may_end.set()
    assert beside.wait() is None
    assert done == []
    assert not any(thread.name == "test" and thread.is_alive() for thread in _others())
    beside.resume()
    assert beside.wait() is None
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

    beside = Beside("test", [fail, lambda: done.append(1)])
    beside.resume()
    assert isinstance(beside.wait(), ValueError)
    beside.append(lambda: done.append(2))
    assert isinstance(beside.wait(), ValueError)
    beside.resume()
    beside.wait()
    assert done == []
