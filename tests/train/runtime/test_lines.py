"""Lines between ranks of one host: who may call, what is heard, and what of a rank that lets go."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from zerofx.runtime.comm.same_host.lines import AnnouncingEnd, Calls, ReadingEnd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")


def _stranger(calls: Calls) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.connect(f"\0zerofx-{calls.name}")
    return found


def _line(rank_timeout_seconds: float = 60) -> tuple[AnnouncingEnd, ReadingEnd]:
    """A line from rank 1 to rank 0."""
    callee, caller = Calls(rank_timeout_seconds), Calls(rank_timeout_seconds)
    there = caller.call(0, callee.name, os.getpid())
    assert there is not None
    here = callee.take({1: os.getpid()})[1]
    callee.close()
    caller.close()
    return there, here


def test_what_is_announced_is_heard_in_order_and_that_it_was_read_in_any() -> None:
    there, here = _line()
    assert [there.announce(tag, 100 * tag, tag) for tag in (5, 6, 7)] == [1, 2, 3]
    for tag in (5, 6, 7):
        assert here.next(tag) == (100 * tag, tag)
        here.tell_read()
    for number in (3, 1, 2):
        there.await_read(number)


def test_several_threads_can_wait_for_what_has_been_read() -> None:
    there, here = _line()
    numbers = [there.announce(tag, 0, 0) for tag in range(4)]
    waiting = [threading.Thread(target=there.await_read, args=(number,)) for number in numbers]
    for thread in waiting:
        thread.start()
    for tag in range(4):
        here.next(tag)
        here.tell_read()
    for thread in waiting:
        thread.join(60)
    assert not any(thread.is_alive() for thread in waiting)


def test_a_message_that_has_not_been_read_is_waited_for() -> None:
    there, here = _line(rank_timeout_seconds=1)
    first, second = there.announce(1, 0, 0), there.announce(2, 0, 0)
    here.next(1)
    here.tell_read()
    there.await_read(first)
    with pytest.raises(RuntimeError, match="rank 0 did not come in time"):
        there.await_read(second)


def test_ranks_that_are_in_different_places_do_not_take_one_message_for_another() -> None:
    there, here = _line()
    there.announce(1, 0, 0)
    with pytest.raises(AssertionError, match="message 1 is sent where 2 is expected"):
        here.next(2)


_STRANGER = """
import socket, sys
calls = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for call in calls:
    call.connect("\\0zerofx-" + sys.argv[1])
print("called", flush=True)
print([call.recv(1) for call in calls], flush=True)
"""


@contextlib.contextmanager
def _strangers(calls: Calls, num: int) -> Iterator[subprocess.Popen[str]]:
    """A process that is no rank calls ``num`` times, says nothing, and waits for what it is told."""
    command = [sys.executable, "-c", _STRANGER, str(calls.name), str(num)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "called\n"
        yield process


def test_only_ranks_are_heard_and_nobody_else_is_waited_for() -> None:
    callee, caller = Calls(60), Calls(60)
    with _strangers(callee, 40) as process:
        there = caller.call(0, callee.name, os.getpid())
        assert there is not None
        begun = time.monotonic()
        here = callee.take({1: os.getpid()})[1]
        assert time.monotonic() - begun < 2
        there.announce(1, 2, 3)
        assert here.next(1) == (2, 3)
        output, _ = process.communicate(timeout=60)
        assert output == f"{[b''] * 40}\n"
    callee.close()
    caller.close()


def test_who_is_another_user_is_no_rank_whatever_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    callee, caller = Calls(1), Calls(60)
    connection = _stranger(callee)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert caller.call(0, callee.name, os.getpid()) is None
        with pytest.raises(RuntimeError, match="rank 1 did not come in time"):
            callee.take({1: os.getpid()})
    assert connection.recv(1) == b""
    connection.close()
    callee.close()
    caller.close()


def test_a_queue_that_is_full_of_strangers_costs_a_second_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    full, other, caller = Calls(60), Calls(60), Calls(60)
    with _strangers(full, 3) as process:
        begun = time.monotonic()
        assert caller.call(0, full.name, os.getpid()) is None
        assert caller.call(1, full.name, os.getpid()) is None
        assert time.monotonic() - begun < 3
        assert caller.call(2, other.name, os.getpid()) is not None
        for calls in (full, other, caller):
            calls.close()
        process.kill()


def test_a_name_that_somebody_else_has_is_not_called() -> None:
    callee, caller = Calls(60), Calls(60)
    assert caller.call(0, callee.name, os.getppid()) is None
    callee.close()
    caller.close()


def test_where_nobody_listens_there_is_no_line() -> None:
    caller, gone = Calls(60), Calls(60)
    gone.close()
    assert caller.call(0, gone.name, os.getpid()) is None
    assert caller.call(0, 0, os.getpid()) is None
    caller.close()


def test_without_such_sockets_there_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refused)
    assert Calls(60).name == 0


@pytest.mark.days(3)
@pytest.mark.parametrize("end", [0, 1])
def test_an_end_that_nobody_has_any_more_is_closed(end: int) -> None:
    ends: list[AnnouncingEnd | ReadingEnd] = list(_line())
    left = ends[1 - end]
    del ends
    gc.collect()
    with pytest.raises(RuntimeError, match=f"the connection to rank {1 - end} is gone"):
        left.await_read(1) if isinstance(left, AnnouncingEnd) else left.next(1)


def test_a_rank_that_lets_go_no_longer_waits_itself() -> None:
    _there, here = _line()
    failed: list[str] = []

    def wait() -> None:
        try:
            here.next(1)
        except RuntimeError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.close()
    waiting.join(60)
    assert failed == ["the connection to rank 1 is gone: it was closed"]
