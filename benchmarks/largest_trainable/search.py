"""The search for the largest model that trains, a process for each size, and its table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

import zerofx
from benchmarks.lib.processes import ROOT, high_water_bytes
from zerofx.errors import MemoryBudgetError
from zerofx.units import format_bytes, parse_bytes

NUM_STEPS = 2


LIBRARY_BYTES = 400 << 20  # about what Python and torch take: for where the first search begins


WIDTH_UNIT = 128


CLOSE = 0.05  # the search ends where what fails is at most so much larger than what trains


GROWTH = 1.5  # of the size, while all that was tried trains, or none


_LOOK_SECONDS = 0.02  # between two looks at a process's memory


_TAIL_CHARACTERS = 400


@dataclass(frozen=True)
class Axis:
    """What grows: ``layers`` of ``dim``, or the width of so many layers, in steps of ``unit``."""

    name: str
    unit: int
    fixed: int

    def shape(self, size: int) -> tuple[int, int]:
        """The width and the number of layers of a size."""
        return (self.fixed, size) if self.name == "layers" else (size * self.unit, self.fixed)

    def numel(self, size: int) -> int:
        """Parameters of the model of a size."""
        from benchmarks.largest_trainable.worker import gpt

        dim, depth = self.shape(size)
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in gpt(dim, depth).parameters())


@dataclass(frozen=True)
class Trial:
    """One size of one contender: whether it trained, the most that was resident, and why it did not."""

    size: int
    numel: int
    trained: bool
    seconds: float
    imported_bytes: int
    peak_bytes: int
    losses: list[float]
    reason: str = ""


@dataclass
class Search:
    """All trials of one contender along one axis."""

    contender: str
    axis: str
    trials: list[Trial] = field(default_factory=list)
    ended: str = ""

    @property
    def largest(self) -> Trial | None:
        """The largest that trained."""
        return max((trial for trial in self.trials if trial.trained), key=lambda trial: trial.size, default=None)

    @property
    def smallest_failed(self) -> Trial | None:
        """The smallest that did not."""
        return min((trial for trial in self.trials if not trial.trained), key=lambda trial: trial.size, default=None)


def next_size(search: Search, first: int) -> int | None:
    """What to try next; None where what trains and what does not are close."""
    below = search.largest.size if search.largest else 0
    above = search.smallest_failed.size if search.smallest_failed else None
    if not search.trials:
        return max(first, 1)
    if above is None:
        return max(below + 1, int(below * GROWTH))
    if above - below <= max(1, int(CLOSE * below)):
        return None
    return (below + above) // 2 if below else max(1, int(above / GROWTH))


def find_largest(search: Search, first: int, attempt: Callable[[int], Trial], until: float) -> None:
    """Try sizes from ``first`` on, until the largest is known, or ``until`` is past (``time.monotonic`` seconds)."""
    with tqdm(desc=f"{search.contender}, {search.axis}", unit=" trials", disable=None) as bar:
        while (size := next_size(search, first)) is not None:
            # What has trained took so long for each of its layers: do not begin what the time is too short for.
            past = [trial.seconds / trial.size for trial in search.trials if trial.trained]
            if search.trials and time.monotonic() + (max(past) * size if past else 0.0) > until:
                search.ended = "out of time"
                return
            bar.set_postfix_str(f"{size} now")
            trial = attempt(size)
            search.trials.append(trial)
            bar.update()
            verdict = "trains" if trial.trained else f"does not: {trial.reason}"
            bar.write(f"{search.contender}, {trial.numel / 1e6:,.0f} M: {verdict}, {format_bytes(trial.peak_bytes)}")


def attempt(contender: str, axis: Axis, cap_bytes: int, folder: Path, most_seconds: float, size: int) -> Trial:
    """Train one size in a process of its own."""
    dim, depth = axis.shape(size)
    request = {"contender": contender, "dim": dim, "depth": depth, "num_steps": NUM_STEPS, "cap_bytes": cap_bytes}
    extensions = folder / "torch_extensions"
    for lock in extensions.rglob("lock"):  # of a trial that was killed while it built DeepSpeed's operators
        lock.unlink()
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(dir=folder, prefix="trial-") as own:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "ZEROFX_NVME_DIR": own,
            "ZEROFX_DUMP_DIR": own,
            "TORCH_EXTENSIONS_DIR": str(extensions),
        }
        command = [sys.executable, "-m", "benchmarks.largest_trainable.worker", json.dumps({**request, "folder": own})]
        out, log = Path(own) / "answers", Path(own) / "log"
        began = time.monotonic()
        with out.open("w") as answers, log.open("w") as errors:
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=answers, stderr=errors)
            try:
                peak, reason = watch(process, cap_bytes, began + most_seconds)
            finally:  # whoever interrupts the search ends the trial
                process.kill()
                process.wait()
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        if process.returncode and not reason:
            reason = _last_line(log.read_text(errors="replace"))
    facts: dict[str, Any] = {key: value for line in lines for key, value in line.items()}
    losses = [line["loss"] for line in lines if "loss" in line]
    peak = max(peak, facts.get("peak_bytes", 0))
    if not reason and peak > cap_bytes:
        reason = "over the cap"
    return Trial(
        size,
        axis.numel(size),
        not reason and len(losses) == NUM_STEPS,
        time.monotonic() - began,
        facts.get("imported_bytes", 0),
        peak,
        losses,
        reason,
    )


def watch(process: subprocess.Popen[bytes], cap_bytes: int, until: float) -> tuple[int, str]:
    """Wait for a process, and end it when it is over the cap or its time: the most that was resident, and why."""
    peak, reason = 0, ""
    while process.poll() is None:
        peak = max(peak, high_water_bytes(process.pid))
        if not reason and peak > cap_bytes:
            reason = "over the cap"
        elif not reason and time.monotonic() > until:
            reason = "out of time"
        if reason:
            process.kill()
        time.sleep(_LOOK_SECONDS)
    return peak, reason


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][-_TAIL_CHARACTERS:] if lines else "ended without a word"


def first_plain(axis: Axis, room_bytes: int) -> int:
    """The largest size whose plain training is predicted to take ``room_bytes`` at most."""
    from benchmarks.largest_trainable.worker import adamw, gpt, one_batch

    def predicted(size: int) -> int:
        with torch.device("meta"):
            model = gpt(*axis.shape(size))
        planned = zerofx.plan(
            model, adamw(model), one_batch(), 0,
            machine="cpu", backend="eager", recompute="none", offload="none", tile="none",
        )  # fmt: skip
        # Plain training has all gradients at once, a planned step as few as it can.
        return planned.plan.peak_bytes["device"] + 4 * axis.numel(size)

    return _largest_size(lambda size: predicted(size) <= room_bytes)


def first_zerofx(axis: Axis, at_least: float, plain: Trial | None, room_bytes: int) -> int:
    """Along layers, the size at the multiple of plain AdamW's that is asked for; by width, where plans end to fit."""
    from benchmarks.largest_trainable.worker import adamw, budgets, gpt, one_batch

    if axis.name == "layers":
        numel = at_least * plain.numel if plain else 0
        return _largest_size(lambda size: axis.numel(size) < numel) + 1
    device_bytes, host_bytes = budgets(room_bytes)

    def fits(size: int) -> bool:
        with torch.device("meta"):
            model = gpt(*axis.shape(size))
        try:
            zerofx.plan(
                model,
                adamw(model),
                one_batch(),
                machine="cpu",
                backend="eager",
                memory_budget=device_bytes,
                host_budget=host_bytes,
                offload="nvme",
            )
        except MemoryBudgetError:
            return False
        return True

    return _largest_size(fits, plain.size if plain else 1)


def _largest_size(holds: Callable[[int], bool], start: int = 1) -> int:
    """The largest size for which it holds, which it does up to a size; at least 1. Looked for from ``start`` on."""
    below, above = 0, max(start, 1)
    while holds(above):
        below, above = above, int(GROWTH * above) + 1
    while above - below > 1:
        middle = (below + above) // 2 if below else int(above / GROWTH)
        below, above = (middle, above) if holds(middle) else (below, middle)
    return max(below, 1)


def run(axis: Axis, options: argparse.Namespace, contenders: list[str], folder: Path) -> list[Search]:
    """Search along one axis for all contenders, plain AdamW first."""
    cap = parse_bytes(options.cap)
    searches: list[Search] = []
    for contender in contenders:
        search = Search(contender, axis.name)
        plain = searches[0].largest if searches else None
        if contender == "zerofx":
            imported = plain.imported_bytes if plain else 0
            first = first_zerofx(axis, options.at_least, plain, cap - imported)
        else:
            first = plain.size if plain else first_plain(axis, cap - LIBRARY_BYTES)
        try:
            each = partial(attempt, contender, axis, cap, folder, 60 * options.patience)
            find_largest(search, first, each, time.monotonic() + 60 * options.minutes)
        finally:
            searches.append(search)
    return searches


def table(searches: list[Search], cap_bytes: int) -> str:
    """A row for each contender: the largest that trained, the smallest that did not, and the ratio to the first."""
    rows = []
    for search in searches:
        baseline, best, failed = searches[0].largest, search.largest, search.smallest_failed
        if best is None:
            rows.append([search.contender, "", "", "", "", "", f"{failed.reason if failed else search.ended}"])
            continue
        ratio = f"{best.numel / baseline.numel:.1f}" if baseline else ""
        why = f"{failed.numel / 1e6:,.0f} M: {failed.reason}" if failed else search.ended
        rows.append(
            [
                search.contender, f"{best.numel / 1e6:,.0f} M", str(best.size), ratio, format_bytes(best.peak_bytes),
                format_bytes(best.imported_bytes), why,
            ]
        )  # fmt: skip
    headers = [f"within {format_bytes(cap_bytes)}", "parameters", searches[0].axis, "ratio", "most resident"]
    headers += ["of it libraries", "first that does not train"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
