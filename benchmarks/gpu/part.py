"""A part of ``make gpu``: its cases one after the other within a time, each recorded as soon as it has ended."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import ROOT, Case, Entry, run
from benchmarks.gpu.setup import Setup, lacking
from benchmarks.lib.json_file import write_json

Cases = Callable[[Setup, Mapping[str, Entry]], Iterator[Case]]
_SECONDS_FOR_FACTS = 60.0


@dataclass(frozen=True)
class Record:
    """The JSON and the log of a part in a folder."""

    part: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.part}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.part}.log"

    def say(self, text: str) -> None:
        """A line for whoever watches, and for the log."""
        line = f"{time.strftime('%H:%M:%S')} {self.part}: {text}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        with self.log.open("a") as log:
            log.write(line)

    def write(self, facts: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
        """All that is known so far."""
        data = {"part": self.part, **facts, "cases": [asdict(entry) for entry in entries.values()]}
        write_json(self.path, data)

    def ran_before(self, facts: Mapping[str, Any]) -> dict[str, Entry]:
        """What ran in this folder with the same code, on the same device and at the same sizes."""
        if not self.path.exists():
            return {}
        data = json.loads(self.path.read_text())
        if any(data.get(name) != facts[name] for name in ("code", "device", "sizes")):
            return {}
        return {entry["name"]: Entry(**entry) for entry in data["cases"] if entry["status"] == "ran"}


def machine_facts() -> dict[str, Any]:
    """What ``benchmarks.gpu.machine`` says, or under ``"failed"`` why it says nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS_FOR_FACTS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"expected torch to list the devices within {_SECONDS_FOR_FACTS:.0f} s, found it did not"}
    if answer.returncode:
        return {"failed": (answer.stderr.strip().splitlines() or ["ended without a word"])[-1]}
    facts: dict[str, Any] = json.loads(answer.stdout)
    return facts


def code_hash() -> str:
    """Of all that a case may run."""
    digest = hashlib.sha256()
    for folder in ("zerofx", "passes", "scheduler", "codegen", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run_part(
    record: Record, setup: Setup, cases: Cases, facts: dict[str, Any], seconds: float, only: tuple[str, ...] = ()
) -> None:
    """Run what fits into ``seconds``; the rest is listed as not run.

    ``facts`` say what the results belong to. Cases that ran before are not run again. ``only``: of the others, those
    whose name has one of these; all where it is empty.
    """
    until = time.monotonic() + seconds
    before = record.ran_before(facts)
    entries: dict[str, Entry] = {}
    record.write(facts, entries)
    if no_device := _no_device(setup):
        _settle(record, facts, entries, Entry("all", "lacking", no_device))
        return
    try:
        for case in cases(setup, entries):
            asked_for = not only or any(word in case.name for word in only)
            skipped = None if asked_for else Entry(case.name, "not run", "not asked for")
            _settle(record, facts, entries, before.get(case.name) or skipped or _attempt(case, setup, until, record))
    except Exception:
        # A mistake of the part's own: the file says so, and whoever started it sees it.
        text = traceback.format_exc()
        _settle(record, facts, entries, Entry("the part itself", "failed", text.splitlines()[-1], text))
        raise
    counts = Counter(entry.status for entry in entries.values())
    record.say(f"{', '.join(f'{number} {status}' for status, number in counts.items())}; {record.path}")


def _no_device(setup: Setup) -> str:
    if "failed" in setup.machine:
        return f"no GPU: {setup.machine['failed']}"
    if setup.device == "cuda" and not setup.machine["gpus"]:
        return f"no GPU: torch {setup.machine['torch']} sees none"
    return ""


def _attempt(case: Case, setup: Setup, until: float, record: Record) -> Entry:
    if reason := lacking(case.needs, setup):
        return Entry(case.name, "lacking", reason)
    if case.blocked:
        return Entry(case.name, "not run", case.blocked)
    left = until - time.monotonic()
    if left < case.least_seconds:
        return Entry(case.name, "not run", f"{max(left, 0):.0f} s were left")
    record.say(f"{case.name} ...")
    return run(case, left, record.log)


def _settle(record: Record, facts: Mapping[str, Any], entries: dict[str, Entry], entry: Entry) -> None:
    entries[entry.name] = entry
    record.write(facts, entries)
    took = f" ({entry.seconds:.0f} s)" if entry.seconds else ""
    record.say(f"{entry.name}: {entry.status}{took}{': ' if entry.why else ''}{entry.why}")
