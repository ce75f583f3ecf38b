"""Lines between ranks of one host: who may call, what is heard, and what of a rank that lets go."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading

import pytest

from zerofx.runtime.comm.same_host import lines
from zerofx.runtime.comm.same_host.lines import AnnouncingEnd, Calls, ReadingEnd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")


def _stranger(calls: Calls) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.connect(f"\0zerofx-{calls.name}")
    return found


def _line(patience_seconds: float = 60) -> tuple[AnnouncingEnd, ReadingEnd]:
    """A line from rank 1 to rank 0."""
    callee, caller = Calls(0, patience_seconds), Calls(1, patience_seconds)
    there = caller.call(0, callee.name, callee.word)
    assert there is not None
    here = callee.take([1])[1]
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
    there, here = _line(patience_seconds=1)
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


def test_only_ranks_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_GREETING_SECONDS", 1)
    callee, caller = Calls(0, 60), Calls(1, 60)
    silent, short, wrong = (_stranger(callee) for _ in range(3))
    short.sendall(b"1")
    short.shutdown(socket.SHUT_WR)
    wrong.sendall(lines._GREETING.pack(1, callee.word + 1))
    there = caller.call(0, callee.name, callee.word)
    assert there is not None
    here = callee.take([1])[1]
    there.announce(1, 2, 3)
    assert here.next(1) == (2, 3)
    for stranger in (silent, short, wrong):
        with contextlib.suppress(ConnectionResetError):  # what it had sent was not read
            assert stranger.recv(1) == b""
        stranger.close()
    callee.close()
    caller.close()


def test_where_nobody_listens_there_is_no_line() -> None:
    caller, gone = Calls(1, 60), Calls(0, 60)
    gone.close()
    assert caller.call(0, gone.name, gone.word) is None
    assert caller.call(0, 0, gone.word) is None
    caller.close()


def test_without_such_sockets_there_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refused)
    assert Calls(0, 60).name == 0


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
