"""Lines between ranks of one host: words of a few bytes over sockets, about addresses to read in each other's memory.

The waiting thread reads the socket itself; no background thread is woken. gloo sends three messages for one and has a
thread take each, and that thread, awake some hundred times a step, takes time from the computation on the same core.

As with gloo, the lines of a rank that drops them, fails or ends are closed, and any rank that waits there fails.

Everybody on the machine can see the names of such sockets, and connect. The kernel, not the caller, is asked for the
caller's process and user: a caller that is no rank is disconnected without a word, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Mapping

from zerofx.runtime.comm.transport import LostRankError

_ANNOUNCEMENT = struct.Struct("=qqq")  # tag, address, bytes
_TIMEOUT = struct.Struct("ll")  # ``struct timeval``: seconds, microseconds
_CREDENTIALS = struct.Struct("3i")  # ``struct ucred``: process, user, group
# For all calls of a rank. The kernel takes one at once, whatever the other rank is at, unless strangers fill its queue.
_CALL_SECONDS = 1.0


class AnnouncingEnd:
    """The end of a line at which a rank announces messages that ``peer`` can read, and hears that they have been."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection = _Connection(connection, peer)
        self._num_announced = self._num_read = 0
        self._hearing = threading.Lock()

    def announce(self, tag: int, address: int, num_bytes: int) -> int:
        """Announce the address of a message; returns its number on this line, from 1."""
        self._connection.send(_ANNOUNCEMENT.pack(tag, address, num_bytes))
        self._num_announced += 1
        return self._num_announced

    def await_read(self, number: int) -> None:
        """Block until message ``number`` has been read; LostRankError if the other rank has failed."""
        with self._hearing:
            while self._num_read < number:
                self._num_read += len(self._connection.receive(number - self._num_read))

    def close(self) -> None:
        """Make the other end fail if it waits, now or later."""
        self._connection.close()


class ReadingEnd:
    """The end of a line at which a rank is told by ``peer`` what to read, and confirms reads."""

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
        """Confirm that the next message, in order, has been read."""
        self._connection.send(b"\0")

    def failure(self, why: object) -> LostRankError:
        """The error of a message that was announced, and cannot be read."""
        return self._connection.failure(why)

    def close(self) -> None:
        """Make the other end fail if it waits, now or later."""
        self._connection.close()


class Calls:
    """The socket, without a file, that other ranks of this host connect to.

    ``name`` is 0 if there are no such sockets. To be closed once all lines are open.
    """

    def __init__(self, rank_timeout_seconds: float) -> None:
        self.name = secrets.randbits(62)
        self._rank_timeout_seconds = rank_timeout_seconds
        self._deadline: float | None = None
        self._socket: socket.socket | None = None
        try:
            if sys.platform != "linux":
                raise OSError("names without files are Linux's")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(_address(self.name))
            self._set_timeout(self._socket, rank_timeout_seconds)
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self.close()
            self.name = 0

    def call(self, peer: int, name: int, process: int) -> AnnouncingEnd | None:
        """Open a line to ``peer``, which has announced its ``name`` and ``process``; None if it cannot be reached."""
        if not name:
            return None
        now = time.monotonic()
        self._deadline = self._deadline or now + _CALL_SECONDS
        connection = socket.socket(socket.AF_UNIX)
        try:
            self._set_timeout(connection, max(0.0, self._deadline - now))
            connection.connect(_address(name))
            self._set_timeout(connection, self._rank_timeout_seconds)
            if _process_of(connection) != process:
                raise ConnectionRefusedError("somebody else has taken the name")
        except OSError:
            connection.close()
            return None
        return AnnouncingEnd(connection, peer)

    def take(self, processes: Mapping[int, int]) -> dict[int, ReadingEnd]:
        """The lines of ranks that have called already, each with its process.

        Raises:
            LostRankError: one of them has not called.
        """
        awaited, ends = {process: peer for peer, process in processes.items()}, dict[int, ReadingEnd]()
        while awaited:
            assert self._socket is not None, "no rank has called where there is nothing to call"
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError as error:
                raise LostRankError(f"rank {next(iter(awaited.values()))} did not come in time") from error
            peer = awaited.pop(_process_of(connection), None)
            if peer is None:
                connection.close()
            else:
                self._set_timeout(connection, self._rank_timeout_seconds)
                ends[peer] = ReadingEnd(connection, peer)
        return ends

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    @staticmethod
    def _set_timeout(connection: socket.socket, seconds: float) -> None:
        # Python's own timeouts ask whether there is something to read before each reading.
        timeout = _TIMEOUT.pack(int(seconds), max(1, int(seconds % 1 * 1e6)))  # none at all is without end
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)


class _Connection:
    """A socket whose errors name the rank at its other end. Closed with the last reference to it."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket, self._peer = connection, peer
        weakref.finalize(self, connection.close)

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except BlockingIOError as error:
            raise LostRankError(f"rank {self._peer} did not come in time") from error
        except OSError as error:
            raise self.failure(error) from error

    def receive(self, num_bytes: int) -> bytes:
        """Receive at least one byte and at most ``num_bytes``."""
        try:
            received = self._socket.recv(num_bytes)
        except BlockingIOError as error:
            raise LostRankError(f"rank {self._peer} did not come in time") from error
        except OSError as error:
            raise self.failure(error) from error
        if not received:
            raise self.failure("it was closed")
        return received

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed there already
            self._socket.shutdown(socket.SHUT_RDWR)

    def failure(self, why: object) -> LostRankError:
        return LostRankError(f"the connection to rank {self._peer} is gone: {why}")


def _process_of(connection: socket.socket) -> int:
    """The process at the other end, as the kernel reports it; 0 for another user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process) if user == os.geteuid() else 0


def _address(name: int) -> str:
    return f"\0zerofx-{name}"  # Linux's abstract names: they go with the socket
