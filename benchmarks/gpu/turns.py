"""Who times when: the device for one case at a time, and the whole machine for what the host works at, too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.gpu.case import Case


class Stopwatch:
    """The seconds of a process in which nothing keeps it from going on."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    def run(self, *, on: bool) -> None:
        self._seconds, self._since = self.seconds, time.monotonic() if on else None


@dataclass
class Running:
    """A case under way, the leader of whose process group is ``pid``; the position of a case among all is ``order``.

    ``timing_since`` is the time on its watch when it first had a turn; ``held_seconds`` and ``waited_seconds`` are of
    its turns; it was ``alone`` where nothing else ran during any; ``neighbours`` is the most cases next to it.
    """

    case: Case
    order: int
    pid: int
    watch: Stopwatch = field(default_factory=Stopwatch)
    timing_since: float | None = None
    held_seconds: float = 0.0
    waited_seconds: float = 0.0
    alone: bool = True
    neighbours: int = 0
    is_stopped: bool = False

    def stop(self, *, on: bool) -> None:
        """Have all its processes stand still, or go on."""
        if on != self.is_stopped:
            self.is_stopped = on
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGSTOP if on else signal.SIGCONT)

    @property
    def is_over(self) -> bool:
        """Whether it has taken longer than it may, before its first turn or from there on."""
        if self.timing_since is None:
            return self.watch.seconds > self.case.prepare_seconds
        return self.watch.seconds - self.timing_since > self.case.seconds


@dataclass(eq=False)
class _Asked:
    name: str
    whole_machine: bool
    granted: asyncio.Future[None]


class Turns:
    """Gives turns to the cases that run, those of the most worth first; one that ends, however, gives its turn back."""

    def __init__(self, running: Mapping[str, Running]) -> None:
        self._running = running
        self._waiting: list[_Asked] = []
        self._holder: _Asked | None = None
        self._num_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One turn, from the moment that it is asked for until the connection ends."""
        self._num_open += 1
        try:
            await self._answer(reader, writer)
        finally:
            self._num_open -= 1

    async def wait_for_ends(self) -> None:
        """Wait until all connections have ended, as they do with the processes that they are of."""
        while self._num_open:
            await asyncio.sleep(0.01)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:
            return  # it ended before it had asked
        request = json.loads(line)
        asked = _Asked(request["case"], request["whole_machine"], asyncio.get_running_loop().create_future())
        began = time.monotonic()
        self._waiting.append(asked)
        ended = asyncio.create_task(reader.read())
        self.settle()
        await asyncio.wait((asked.granted, ended), return_when=asyncio.FIRST_COMPLETED)
        granted = time.monotonic()
        running = self._running.get(asked.name)
        if asked.granted.done():
            if running is not None and running.timing_since is None:
                running.timing_since = running.watch.seconds
            with contextlib.suppress(ConnectionError):
                writer.write(b"!")
                await writer.drain()
            await ended
            self._holder = None
        else:
            self._waiting.remove(asked)
        if running is not None:
            running.waited_seconds += granted - began
            running.held_seconds += time.monotonic() - granted
        writer.close()
        self.settle()

    def settle(self) -> None:
        """Give the turn to whom it is due; stop and start the others. To be called whenever a case begins or ends."""
        if self._holder is None and self._waiting:
            self._holder = min(self._waiting, key=self._order)
            self._waiting.remove(self._holder)
            self._holder.granted.set_result(None)
        holder, waiting = self._holder, {asked.name for asked in self._waiting}
        for name, running in self._running.items():
            is_other = holder is not None and holder.name != name
            stops = holder is not None and holder.whole_machine and is_other
            running.stop(on=stops)
            running.watch.run(on=not (stops or (is_other and name in waiting)))
            running.neighbours = max(running.neighbours, len(self._running) - 1)
            if holder is not None and holder.name == name and not holder.whole_machine and len(self._running) > 1:
                running.alone = False

    def _order(self, asked: _Asked) -> int:
        running = self._running.get(asked.name)
        return -1 if running is None else running.order
