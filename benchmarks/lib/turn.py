"""Turns on a machine that several benchmarks share: one process at a time has the device for its timing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

ADDRESS = "BENCHMARK_TURNS"  # the socket of whoever gives turns
CASE = "BENCHMARK_CASE"  # the name under which this process asks


@contextlib.contextmanager
def turn(*, whole_machine: bool = False) -> Iterator[None]:
    """Wait until this process has the device; with ``whole_machine`` all others are stopped until it gives it back.

    What compiles goes before: another process may have been stopped with a lock of the compiler's cache. Where the
    environment names nobody who gives turns, there is nobody to share with.

    Raises:
        ConnectionError: whoever gives turns has ended.
    """
    address = os.environ.get(ADDRESS)
    if address is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        line.sendall(json.dumps({"case": os.environ[CASE], "whole_machine": whole_machine}).encode() + b"\n")
        if not line.recv(1):
            raise ConnectionError(f"expected a turn from {address}, found that whoever gives them has ended")
        yield
