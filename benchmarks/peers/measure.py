"""Contenders of a group measured in turn, and what is kept of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import ContenderFailedError, Ranks, device_name
from benchmarks.lib.turn import turn
from benchmarks.peers.groups import Contender, Group, absent, selected
from benchmarks.peers.report import MATMUL


def chunks(contenders: list[Contender], limit: int) -> Iterator[list[Contender]]:
    """``contenders`` so many at a time, the first of them in each; the matrix products are too small to count."""
    baseline, *others = contenders
    size = max(1, limit - 1)
    for start in range(0, max(1, len(others)), size):
        yield [baseline, *others[start : start + size]]


def measure_group(
    options: argparse.Namespace,
    group: Group,
    contenders: list[Contender],
    cache: Path,
    note: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """What was found of each contender: its name, chunk, facts, and the seconds and CPU seconds of each step.

    ``note`` is called with what is known so far, after each contender that is ready and after each round.
    """
    num_ranks, num_threads = (1, options.ranks * options.threads) if group.alone else (options.ranks, options.threads)
    limit = options.together or _room(options, num_ranks)
    results: list[dict[str, Any]] = []
    peaks: dict[str, int] = {}
    for number, few in enumerate(chunks(contenders, limit)):
        say(f"{options.shape}, {group.name}: {', '.join(contender.name for contender in few)}")
        results += _measure_few(
            options, [Contender(MATMUL, {"family": MATMUL}), *few], num_ranks, num_threads, cache, number, peaks,
            partial(_note_after, tuple(results), note),
        )  # fmt: skip
    return results


def _note_after(
    before: tuple[dict[str, Any], ...], note: Callable[[list[dict[str, Any]]], None], results: list[dict[str, Any]]
) -> None:
    """Hand on what is known of a few contenders, with what was known before them."""
    note([*before, *results])


def _measure_few(
    options: argparse.Namespace,
    few: list[Contender],
    num_ranks: int,
    num_threads: int,
    cache: Path,
    chunk: int,
    peaks: dict[str, int],
    note: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    ready: list[Ranks] = []
    results: dict[str, dict[str, Any]] = {}
    own_caches = getattr(options, "ready_again", False)

    def begin(contender: Contender, request: dict[str, Any]) -> Ranks:
        message = {"shape": options.shape, "device": options.device, "dtype": options.dtype, "contender": request}
        its_cache = cache / contender.name.replace(" ", "_") if own_caches else cache
        return Ranks(contender.name, "benchmarks.peers.worker", message, num_ranks, num_threads, its_cache)

    begun: dict[str, Ranks] = {}
    try:
        if getattr(options, "at_once", False):
            begun |= {contender.name: begin(contender, contender.request) for contender in few}
        for contender in few:
            request = dict(contender.request)
            if contender.budget_of:
                known = [peaks[name] for name in contender.budget_of if name in peaks]
                if not known:
                    say(f"  {contender.name}: left out, the peaks that are its budget were not measured")
                    continue
                request["budget"] = int(min(known) * contender.budget_share)
            ranks = begun.get(contender.name) or begin(contender, request)
            ready.append(ranks)
            row: dict[str, Any] = {
                "name": contender.name,
                "chunk": chunk,
                "rounds": [],
                "request": request,
                "facts": {},
            }
            results[contender.name] = row
            began = time.monotonic()
            try:
                row["facts"] = ranks.read()[0]
            except ContenderFailedError as error:
                row["facts"] = {"failed": str(error)}
            if "refused" in row["facts"] or "failed" in row["facts"]:
                say(f"  {contender.name}: {row['facts']}")
                ready.remove(ranks)
                ranks.close()
                continue
            peak = peaks[contender.name] = row["facts"]["peak_bytes"]
            say(f"  {contender.name}: ready after {time.monotonic() - began:.0f} s, peak {peak / 1e6:.0f} MB")
            note(list(results.values()))
        for number in range(options.rounds):
            with turn(whole_machine=True):
                for ranks in tuple(ready):
                    try:
                        # The first step of a turn finds cold caches.
                        results[ranks.name]["rounds"].append(ranks.run(options.steps + 1)[1:])
                    except ContenderFailedError as error:
                        results[ranks.name]["facts"]["failed"] = str(error)
                        say(f"  {error}")
                        ready.remove(ranks)
                        ranks.close()
            say(f"  round {number + 1} of {options.rounds}: " + _latest(results))
            note(list(results.values()))
        if own_caches:
            for contender in (each for each in few if any(ranks.name == each.name for ranks in ready)):
                again = begun[f"{contender.name} again"] = begin(contender, results[contender.name]["request"])
                results[contender.name]["facts"]["ready_again_seconds"] = again.read()[0]["ready_seconds"]
                again.close()
                note(list(results.values()))
    finally:
        for ranks in {*ready, *begun.values()}:
            ranks.close()
    return list(results.values())


def _latest(results: dict[str, dict[str, Any]]) -> str:
    """The least seconds of the latest round of all but the matrix products."""
    return ", ".join(
        f"{name} {min(wall for wall, _ in row['rounds'][-1]):.3f} s"
        for name, row in results.items()
        if row["rounds"] and name != MATMUL
    )


def _room(options: argparse.Namespace, num_ranks: int) -> int:
    """How many contenders of ``num_ranks`` processes memory has room for at a time."""
    if options.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    each = SHAPES[options.shape].memory_gb * 1e9 * (1 if options.device == "cuda" else num_ranks)
    return max(2, int(0.85 * free / each))


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers belong to."""
    name = device_name(options.device)
    return {"name": name, "cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()}


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def record(path: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The results in ``path`` after ``change``, which are written there."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    change(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data)
    return data


def measure(options: argparse.Namespace, path: Path, cache: Path) -> None:
    """Measure group by group, and record each."""
    key = f"{options.shape}, {options.dtype}"
    done = record(path, lambda _: None)["runs"].get(key, {}).get("groups", {})
    for group, contenders in selected(options):
        if options.resume and group.name in done:
            say(f"{options.shape}, {group.name}: measured before")
            continue
        began = time.monotonic()
        results = measure_group(options, group, contenders, cache) + absent(group)
        num_ranks = 1 if group.alone else options.ranks

        def add(data: dict[str, Any], name: str = group.name, results: Any = results, ranks: int = num_ranks) -> None:
            run = data["runs"].setdefault(key, {"groups": {}})
            run |= {"machine": describe_machine(options), "shape": options.shape, "dtype": options.dtype}
            run["groups"][name] = {"num_ranks": ranks, "num_threads": options.threads, "contenders": results}

        record(path, add)
        say(f"{options.shape}, {group.name}: measured in {time.monotonic() - began:.0f} s")
