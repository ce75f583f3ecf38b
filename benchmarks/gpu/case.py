"""One case of a part: a process of its own, held to a time, whose results are the JSON files that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.json_file import write_json

ROOT = Path(__file__).resolve().parents[2]
OUT = "{out}"  # in a command: the folder that its results go to
CUT_OFF = "cut_off"  # in results: the time was over
RESULT = "result"  # what a worker of this folder writes there, without its suffix
_TAIL_CHARACTERS = 6000
_SECONDS_TO_END = 5.0  # for a process that is over its time to say where it is
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b")

Status = Literal["ran", "failed", "lacking", "not run"]


@dataclass(frozen=True)
class Case:
    """``command`` is what Python runs, as ``("-m", "benchmarks.kernels", "--out", OUT)``.

    It is killed after ``seconds``, and not begun where less than ``least_seconds`` are left. ``needs`` are names of
    libraries, ``"2 GPUs"`` or ``"drive"``; ``blocked`` says why it cannot run, if it cannot; ``variables`` are what its
    environment has besides.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = 240.0
    least_seconds: float = 20.0
    needs: tuple[str, ...] = ()
    blocked: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """What became of a case: ``why`` it has not run, or has failed, on one line, with the end of its output in that
    case; ``results`` are of the files that it wrote, also where it was killed."""

    name: str
    status: Status
    why: str = ""
    output: str = ""
    seconds: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)


def worker(name: str, module: str, request: Mapping[str, Any], **options: Any) -> Case:
    """A case that runs a worker of this folder with ``request`` as its argument."""
    return Case(name, ("-m", f"benchmarks.gpu.{module}", json.dumps(request), OUT), **options)


class Answers:
    """What a worker has to say so far: written with each addition, so that it is there whatever becomes of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{RESULT}.json"
        self._facts: dict[str, Any] = {}

    def add(self, **facts: Any) -> None:
        self._facts |= facts
        write_json(self._path, self._facts)


def run(case: Case, most_seconds: float, log: Path) -> Entry:
    """Run a case for ``most_seconds`` at most; what it prints is appended to ``log``.

    One that is ended by that, and not by its own limit, has not failed: its results say ``cut_off``.
    """
    seconds, cut_off = min(case.seconds, most_seconds), False
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-case-") as folder, log.open("a") as output:
        start = output.tell()
        command = [sys.executable, *(part.replace(OUT, folder) for part in case.command)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(Path(folder), case.variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts ends with it
        )
        try:
            code = process.wait(seconds)
            why = "" if code == 0 else _ended(code)
        except subprocess.TimeoutExpired:
            cut_off = seconds < case.seconds
            why = f"cut off after {seconds:.0f} s" if cut_off else f"over its {seconds:.0f} s"
            _say_where(process)
        finally:
            _kill(process)
        text = _tail(log, start)
        results = _results(Path(folder))
    took = time.monotonic() - began
    if not why:
        return Entry(case.name, "ran", seconds=took, results=results)
    if cut_off:
        return Entry(case.name, "not run", why, text, took, {**results, CUT_OFF: True})
    lines = [line for line in text.splitlines() if _ERROR.match(line)]
    why = f"{why}: {lines[-1]}" if lines else why
    return Entry(case.name, "failed", why, text, took, results)


def _environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    return {
        **{name: str(folder) for name, folder in caches().items()},
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"), *([inherited] if inherited else []))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "ZEROFX_DUMP_DIR": str(folder / "dumps"),
        **variables,
    }


def caches() -> dict[str, Path]:
    """Folders for what is compiled, which cases share, by the variables that name them: none in the user's own."""
    folder = Path(tempfile.gettempdir()) / f"zerofx-gpu-{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _say_where(process: subprocess.Popen[bytes]) -> None:
    """Have a process write where its threads are, as Python's faulthandler does on this signal."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed next
        process.wait(_SECONDS_TO_END)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")[-_TAIL_CHARACTERS:]


def _results(folder: Path) -> dict[str, Any]:
    """A worker's answers, and other files by their names."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    own = files.pop(RESULT, {})
    return {**own, **files}
