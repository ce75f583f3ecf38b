"""Runs a list of cases until a deadline: several prepare at once, and take turns at the device."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import OUT, ROOT, Case, Entry, Status, read_results
from benchmarks.gpu.record import Record
from benchmarks.gpu.setup import Setup, lacking
from benchmarks.gpu.turns import Running, Turns
from benchmarks.lib.turn import ADDRESS, CASE

_TAIL_CHARACTERS = 6000
_SECONDS_TO_END = 5.0  # for a process that is over its time to say where it is
_SECONDS_TO_CLOSE = _SECONDS_TO_END + 3.0  # before the deadline, when what still runs is cut off
_SECONDS_OF_A_LOOK = 0.1
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b")
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Run:
    """Cases that run until ``until``, a time of the monotonic clock, ``together`` of them at a time.

    The next one is that of the most worth that has time left, and begins once its memory is free.
    """

    def __init__(
        self, setup: Setup, record: Record, cases: Sequence[Case], until: float, together: int, commit: str, code: str
    ) -> None:
        self._setup, self._record = setup, record
        self._left = sorted(cases, key=lambda case: -case.worth)
        self._cut_off_at = until - _SECONDS_TO_CLOSE
        self._together = together
        self._known: dict[str, Any] = {"commit": commit, "code": code}
        self._running: dict[str, Running] = {}
        self._folders: dict[str, Path] = {}
        self._turns = Turns(self._running)
        self._told_to_end = asyncio.Event()
        self._ended = asyncio.Condition()

    async def run(self) -> None:
        """Run what fits; SIGTERM and SIGINT cut off what runs, and all that is known is written."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end.set)
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            self._address = str(Path(folder) / "turns")
            server = await asyncio.start_unix_server(self._turns.answer, self._address)
            self._record.write()
            orders = {case.name: number for number, case in enumerate(self._left)}
            async with server:
                async with asyncio.TaskGroup() as tasks:
                    while (case := await self._next()) is not None:
                        running, process, start = await self._start(case, orders[case.name], Path(folder))
                        tasks.create_task(self._follow(running, process, start))
                await self._turns.wait_for_ends()
        self._record.write()

    async def _next(self) -> Case | None:
        """The next case that can begin, when it can; those that never can are settled on the way."""
        while self._left:
            case = self._left[0]
            seconds = self._cut_off_at - time.monotonic()
            if reason := lacking(case.needs, self._setup):
                self._settle(Entry(case.name, case.part, "lacking", reason, **self._known))
            elif self._told_to_end.is_set() or seconds < case.cost:
                why = "told to end" if self._told_to_end.is_set() else f"{max(seconds, 0):.0f} s were left"
                self._settle(Entry(case.name, case.part, "not run", why, **self._known))
            elif len(self._running) < self._together and self._has_memory_for(case):
                return self._left.pop(0)
            else:
                async with self._ended:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), 1.0)
                continue
            self._left.pop(0)
        return None

    def _has_memory_for(self, case: Case) -> bool:
        cases = [case, *(running.case for running in self._running.values())]
        fits_device = sum(each.device_gb for each in cases) <= self._setup.device_bytes / 1e9
        return len(cases) == 1 or (
            fits_device and sum(each.host_gb for each in cases) <= self._setup.machine["host_bytes"] / 1e9
        )

    async def _start(self, case: Case, order: int, folder: Path) -> tuple[Running, asyncio.subprocess.Process, Entry]:
        own = Path(tempfile.mkdtemp(prefix="case-", dir=folder))
        out = own / "out"
        out.mkdir()
        cache = own / "cache" if case.own_cache else shared_cache()
        cache.mkdir(parents=True, exist_ok=True)
        entry = Entry(
            case.name, case.part, "running", "under way when this was written",
            cache="warm" if any(cache.iterdir()) else "cold", **self._known,
        )  # fmt: skip
        self._record.say(f"{case.name} ...")
        with (own / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *(part.replace(OUT, str(out)) for part in case.command),
                cwd=ROOT, env=self._environment(case, own, cache), stdin=asyncio.subprocess.DEVNULL,
                stdout=log, stderr=log,
                start_new_session=True,  # what it starts ends with it
                preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        running = Running(case, order, process.pid)
        self._running[case.name], self._folders[case.name] = running, own
        self._turns.settle()
        return running, process, entry

    def _environment(self, case: Case, own: Path, cache: Path) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"), *([inherited] if inherited else []))),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self._setup.num_threads),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            # A machine that another case has measured is not what this one plans for.
            "ZEROFX_CACHE_DIR": str(own / "zerofx"),
            "ZEROFX_DUMP_DIR": str(own / "dumps"),
            "ZEROFX_NVME_DIR": str(self._setup.drive),
            ADDRESS: self._address,
            CASE: case.name,
            **case.variables,
        }

    async def _follow(self, running: Running, process: asyncio.subprocess.Process, begun: Entry) -> None:
        """Wait for a case, end it where its time or all time is over, and note what became of it."""
        case, own = running.case, self._folders[running.case.name]
        ended = asyncio.create_task(process.wait())
        why = ""
        while not ended.done() and not why:
            await asyncio.wait((ended,), timeout=_SECONDS_OF_A_LOOK)
            if not ended.done():
                why = self._reason_to_end(running)
        status: Status = "not run" if why.startswith("cut off") else "failed"
        code = process.returncode
        if why:
            running.stop(on=False)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGABRT)  # Python's faulthandler writes where its threads are
            await asyncio.wait((ended,), timeout=0.5 if self._told_to_end.is_set() else _SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        await ended
        del self._running[case.name]
        self._turns.settle()
        text = (own / "log").read_text(errors="replace")
        with self._record.log.open("a") as log:
            log.write(f"--- {case.name}\n{text}\n")
        if not why and code:
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            errors = [line for line in text.splitlines() if _ERROR.match(line)]
            why = f"{why}: {errors[-1]}" if errors else why
        entry = self._measured(begun, running)
        self._settle(
            replace(entry, status=status if why else "ran", why=why, output=text[-_TAIL_CHARACTERS:] if why else "")
        )
        shutil.rmtree(own)
        async with self._ended:
            self._ended.notify_all()

    def _reason_to_end(self, running: Running) -> str:
        if running.is_over:
            phase, seconds = "a turn", running.case.seconds
            if running.timing_since is None:
                phase, seconds = "preparation", running.case.prepare_seconds
            return f"over its {seconds:.0f} s of {phase}"
        if self._told_to_end.is_set():
            return "cut off: told to end"
        if time.monotonic() > self._cut_off_at:
            return f"cut off after {running.watch.seconds:.0f} s"
        return ""

    def _measured(self, entry: Entry, running: Running) -> Entry:
        """The entry with what is known of the case by now."""
        return replace(
            entry,
            seconds=running.watch.seconds,
            waited_seconds=running.waited_seconds,
            alone=running.alone if running.timing_since is not None else None,
            neighbours=running.neighbours,
            results=read_results(self._folders[running.case.name] / "out"),
        )

    def _settle(self, entry: Entry) -> None:
        self._record.entries[entry.name] = entry
        under_way = [
            self._measured(Entry(name, running.case.part, "running", **self._known), running)
            for name, running in self._running.items()
        ]
        self._record.write(under_way)
        took = f" ({entry.seconds:.0f} s)" if entry.seconds else ""
        self._record.say(f"{entry.name}: {entry.status}{took}{': ' if entry.why else ''}{entry.why}")


def scratch() -> Path:
    """The folder for what cases share and nobody carries away, none of the user's own."""
    return Path(tempfile.gettempdir()) / f"zerofx-gpu-{os.getuid()}"


def shared_cache() -> Path:
    """Of the compiler, for all cases that have none of their own."""
    return scratch() / "cache"


def run(
    setup: Setup, record: Record, cases: Sequence[Case], until: float, together: int, known: Mapping[str, str]
) -> None:
    """Run the cases, as ``Run`` says; ``known`` are code and commit."""

    async def run_all() -> None:
        await Run(setup, record, cases, until, together, known["commit"], known["code"]).run()

    asyncio.run(run_all())
