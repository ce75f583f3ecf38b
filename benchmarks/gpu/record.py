"""The results of ``make gpu`` in one file, whole at every moment, and its log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Entry
from benchmarks.lib.json_file import write_json


class Record:
    """``gpu.json`` and ``gpu.log`` in a folder; ``facts`` say what the entries belong to."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.log = folder / "gpu.json", folder / "gpu.log"
        self._facts = dict(facts)
        self.entries: dict[str, Entry] = {}

    def add_facts(self, **facts: Any) -> None:
        self._facts |= facts

    def say(self, text: str) -> None:
        """A line for whoever watches, and for the log."""
        line = f"{time.strftime('%H:%M:%S')} {text}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        with self.log.open("a") as log:
            log.write(line)

    def write(self, under_way: Iterable[Entry] = ()) -> None:
        """All that is known, also of cases that are under way."""
        entries = [*self.entries.values(), *under_way]
        write_json(self.path, {**self._facts, "cases": [asdict(entry) for entry in entries]})


def ran_before(path: Path, facts: Mapping[str, Any]) -> dict[str, Entry]:
    """What a file says has run of the same code, on the same device and at the same sizes."""
    data = json.loads(path.read_text())
    if any(data.get(name) != facts[name] for name in ("code", "device", "sizes")):
        return {}
    return {entry["name"]: Entry(**entry) for entry in data["cases"] if entry["status"] == "ran"}
