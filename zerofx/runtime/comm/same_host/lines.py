"""Lines between ranks of one host: words of a few bytes, over sockets, about what to read in one another's memory.

The waiting thread reads the socket itself; no background thread is woken. gloo sends three messages for one and has a
thread take each, and that thread, awake some hundred times a step, takes its time from the computation on the same
core.

As with gloo, the lines of a rank that lets go of them, fails or ends are closed, and whoever waits there fails.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterable

from zerofx.runtime.comm.transport import LostRankError

_GREETING = struct.Struct("=qq")  # rank, and the word of whom it calls
_ANNOUNCEMENT = struct.Struct("=qqq")  # tag, address, bytes
_TIMEOUT = struct.Struct("ll")  # ``struct timeval``: seconds, microseconds
_GREETING_SECONDS = 5  # who calls greets at once, or is none of the ranks


class AnnouncingEnd:
    """The end of a line at which a rank says what ``peer`` can read, and hears that it has been."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection = _Connection(connection, peer)
        self._num_announced = self._num_read = 0
        self._hearing = threading.Lock()

    def announce(self, tag: int, address: int, num_bytes: int) -> int:
        """Say where a message lies; returns its number on this line, from 1."""
        self._connection.send(_ANNOUNCEMENT.pack(tag, address, num_bytes))
        self._num_announced += 1
        return self._num_announced

    def await_read(self, number: int) -> None:
        """Block until message ``number`` has been read; LostRankError where the other rank has failed."""
        with self._hearing:
            while self._num_read < number:
                self._num_read += len(self._connection.receive(number - self._num_read))

    def close(self) -> None:
        """Have the other end fail where it waits, or comes to."""
        self._connection.close()


class ReadingEnd:
    """The end of a line at which a rank hears of ``peer`` what to read, and says that it has."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection = _Connection(connection, peer)

    def next(self, tag: int) -> tuple[int, int]:
        """Block until a message, that of ``tag``, is announced: its address and bytes; LostRankError likewise."""
        announced = b""
        while len(announced) < _ANNOUNCEMENT.size:
            announced += self._connection.receive(_ANNOUNCEMENT.size - len(announced))
        number, address, num_bytes = _ANNOUNCEMENT.unpack(announced)
        assert number == tag, f"message {number} is sent where {tag} is expected"
        return address, num_bytes

    def tell_read(self) -> None:
        """Say that the next message, in their order, has been read."""
        self._connection.send(b"\0")

    def close(self) -> None:
        """Have the other end fail where it waits, or comes to."""
        self._connection.close()


class Calls:
    """Where the other ranks of this host can call: a socket without a file, by a name that nobody can guess.

    ``name`` is 0 where there are no such sockets. To be closed once all lines are open.
    """

    def __init__(self, rank: int, patience_seconds: float) -> None:
        self.name, self.word = secrets.randbits(62), secrets.randbits(62)
        self._rank, self._patience_seconds = rank, patience_seconds
        self._socket: socket.socket | None = None
        try:
            if sys.platform != "linux":
                raise OSError("names without files are Linux's")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(_address(self.name))
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self.close()
            self.name = 0

    def call(self, peer: int, name: int, word: int) -> AnnouncingEnd | None:
        """A line to ``peer``, which has told its ``name`` and ``word``; None if it cannot be reached."""
        if not name:
            return None
        connection = socket.socket(socket.AF_UNIX)
        try:
            self._set_patience(connection, self._patience_seconds)
            connection.connect(_address(name))
            connection.sendall(_GREETING.pack(self._rank, word))
        except OSError:
            connection.close()
            return None
        return AnnouncingEnd(connection, peer)

    def take(self, peers: Iterable[int]) -> dict[int, ReadingEnd]:
        """The lines of all ``peers``, which have called already."""
        awaited, ends = set(peers), dict[int, ReadingEnd]()
        while awaited:
            assert self._socket is not None, "no rank has called where there is nothing to call"
            connection, _ = self._socket.accept()
            peer = self._greeting(connection)
            if peer in awaited:
                awaited.discard(peer)
                ends[peer] = ReadingEnd(connection, peer)
            else:
                connection.close()
        return ends

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _greeting(self, connection: socket.socket) -> int:
        """The rank that has called; -1 for others."""
        self._set_patience(connection, _GREETING_SECONDS)
        try:
            greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
        except OSError:
            return -1
        self._set_patience(connection, self._patience_seconds)
        rank, word = _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (-1, 0)
        return int(rank) if word == self.word else -1

    @staticmethod
    def _set_patience(connection: socket.socket, seconds: float) -> None:
        # Python's own timeouts ask whether there is something to read before each reading.
        timeout = _TIMEOUT.pack(int(seconds), max(1, int(seconds % 1 * 1e6)))  # none at all is without end
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)


class _Connection:
    """A socket whose errors say which rank is at its other end. Closed with the last name for it."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket, self._peer = connection, peer
        weakref.finalize(self, connection.close)

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except BlockingIOError as error:
            raise LostRankError(f"rank {self._peer} did not come in time") from error
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, num_bytes: int) -> bytes:
        """At most as many, and at least one."""
        try:
            received = self._socket.recv(num_bytes)
        except BlockingIOError as error:
            raise LostRankError(f"rank {self._peer} did not come in time") from error
        except OSError as error:
            raise self._failure(error) from error
        if not received:
            raise self._failure("it was closed")
        return received

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed there already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _failure(self, why: object) -> LostRankError:
        return LostRankError(f"the connection to rank {self._peer} is gone: {why}")


def _address(name: int) -> str:
    return f"\0zerofx-{name}"  # Linux's abstract names: they go with the socket
