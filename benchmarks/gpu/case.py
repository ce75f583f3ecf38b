"""A case of ``make gpu``: a command with its worth and its cost, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.json_file import write_json

ROOT = Path(__file__).resolve().parents[2]
OUT = "{out}"  # in a command: the folder that its results go to
CUT_OFF = "cut_off_in_writing"  # in results: the file that is not whole
RESULT = "result"  # what a worker of this folder writes there, without its suffix

Status = Literal["ran", "failed", "lacking", "not run", "running"]


@dataclass(frozen=True)
class Case:
    """``command`` is what Python runs, as ``("-m", "benchmarks.kernels", "--out", OUT)``.

    ``cost`` are the seconds that it took when it was measured last, or an estimate: it is not begun where less are
    left. It is killed ``prepare_seconds`` after its start without a turn, and ``seconds`` after its first turn has
    begun; what it waits for turns counts for neither. ``device_gb`` and ``host_gb`` are what it takes of both memories.
    ``needs`` are names of libraries, ``"2 GPUs"``, ``"drive"``, or a path of the checkout; ``variables`` are what its
    environment has besides. With ``own_cache`` it compiles into a cache that is empty at first.
    """

    name: str
    part: str
    worth: int
    cost: float
    command: tuple[str, ...]
    seconds: float = 90.0
    prepare_seconds: float = 90.0
    device_gb: float = 2.0
    host_gb: float = 4.0
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    own_cache: bool = False


@dataclass(frozen=True)
class Entry:
    """What became of a case: ``why`` it has not run, or has failed, on one line, with the end of its output in that
    case; ``results`` are of the files that it wrote, also where it was killed.

    ``seconds`` are its own, without ``waited_seconds`` for turns. ``cache`` says if the compiler's cache was empty
    before it; ``alone``, if nothing else ran while it held the device; ``neighbours``, how many cases ran next to it at
    most. ``code`` is of what was measured, ``commit`` where that was committed (empty: nowhere).
    """

    name: str
    part: str
    status: Status
    why: str = ""
    output: str = ""
    seconds: float = 0.0
    waited_seconds: float = 0.0
    cache: str = ""
    alone: bool | None = None
    neighbours: int | None = None
    commit: str = ""
    code: str = ""
    results: Mapping[str, Any] = field(default_factory=dict)


class Answers:
    """What a worker has to say so far: written with each addition, so that it is there whatever becomes of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{RESULT}.json"
        self._facts: dict[str, Any] = {}

    def add(self, **facts: Any) -> None:
        self._facts |= facts
        write_json(self._path, self._facts)


def read_results(folder: Path) -> dict[str, Any]:
    """A worker's answers, and other files by their names; of one that was cut off in writing, that it was."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            files[path.stem] = json.loads(path.read_text())
        except json.JSONDecodeError:
            files[CUT_OFF] = path.name
    own = files.pop(RESULT, {})
    return {**own, **files}
