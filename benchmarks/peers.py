"""zerofx compared with its peers in one run: DDP, FSDP2, DTensor and DeepSpeed, eager, compiled and checkpointed.

    python -m benchmarks.peers                        # a GPT of 27M on two gloo ranks of one thread: about ten minutes
    python -m benchmarks.peers --shape 110m           # the same of 110M; or llama, a Llama of transformers
    python -m benchmarks.peers --groups sharded       # one group: sharded, accumulated, replicated, shared or single
    python -m benchmarks.peers --only fsdp2 zerofx    # contenders whose name has one of these
    python -m benchmarks.peers --report               # tables and plot from what was measured before
    python -m benchmarks.peers --device cuda --shape llama-1b --dtype bfloat16      # NCCL, or one GPU

Contenders of a group are processes that live side by side, each with its step compiled; rounds go through all of them
in turn (A B C A B C), so that what else the machine does meets them alike. Where memory has room for a few at a time,
the group's baseline is among each few, and ratios go through it.

Every group is written as soon as it is measured, to ``benchmarks/results/peers_<device>.json`` next to what is there of
other shapes and groups; a Markdown table and a plot are made of all of it. What cannot be run (DeepSpeed, where it is
not installed: ``pip install deepspeed``) is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers_report
from benchmarks.json_file import write_json
from benchmarks.models import SHAPES
from benchmarks.peers_report import MATMUL
from benchmarks.processes import ContenderFailedError, Ranks, device_name

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Contender:
    """``request`` is what its workers are told. The least peak of those that ``budget_of`` names, times
    ``budget_share``, is its memory budget."""

    name: str
    request: dict[str, Any]
    budget_of: tuple[str, ...] = ()
    budget_share: float = 1.0


@dataclass(frozen=True)
class Group:
    """Contenders that are compared with each other; the first is the baseline. ``alone``: one process, not many."""

    name: str
    contenders: tuple[Contender, ...]
    alone: bool = False


_CHECKPOINTED = ("FSDP2 + checkpoint", "FSDP2 + checkpoint + compile")
GROUPS = (
    Group(
        "sharded",
        (
            Contender("FSDP2 + compile", {"family": "fsdp2", "compile": True}),
            Contender("zerofx stage 3", {"family": "zerofx", "stage": 3}),
            Contender("zerofx stage 3, 70 %", {"family": "zerofx", "stage": 3}, ("FSDP2 + compile",), 0.70),
            Contender("FSDP2 + compile, memory kept", {"family": "fsdp2", "compile": True, "keep_freed": True}),
            Contender("zerofx stage 3, memory kept", {"family": "zerofx", "stage": 3, "keep_freed": True}),
            Contender("FSDP2", {"family": "fsdp2"}),
            Contender("DeepSpeed ZeRO-3", {"family": "deepspeed", "stage": 3}),
            Contender(_CHECKPOINTED[0], {"family": "fsdp2", "checkpoint": True}),
            Contender(_CHECKPOINTED[1], {"family": "fsdp2", "checkpoint": True, "compile": True}),
            Contender("zerofx stage 3, budget", {"family": "zerofx", "stage": 3}, _CHECKPOINTED),
        ),
    ),
    Group(
        "accumulated",
        (
            Contender("FSDP2 + compile, 4 micro-batches", {"family": "fsdp2", "compile": True, "accumulate": 4}),
            *(
                Contender(
                    f"zerofx stage 3, 4 micro-batches, reduced {reduce}",
                    {"family": "zerofx", "stage": 3, "accumulate": 4, "reduce": reduce},
                )
                for reduce in ("each", "once")
            ),
        ),
    ),
    Group(
        "replicated",
        (
            Contender("DDP + compile", {"family": "ddp", "compile": True}),
            *(Contender(f"zerofx stage {stage}", {"family": "zerofx", "stage": stage}) for stage in (0, 1, 2)),
            Contender("DDP + compile, memory kept", {"family": "ddp", "compile": True, "keep_freed": True}),
            Contender("DDP", {"family": "ddp"}),
            *(Contender(f"DeepSpeed ZeRO-{stage}", {"family": "deepspeed", "stage": stage}) for stage in (1, 2)),
        ),
    ),
    Group(
        "shared",  # ranks compute one batch together
        (
            Contender("DTensor + compile", {"family": "dtensor", "shared": True, "compile": True}),
            Contender("zerofx, shared", {"family": "zerofx", "shared": True}),
            Contender("zerofx, shared, 80 %", {"family": "zerofx", "shared": True}, ("DTensor + compile",), 0.80),
            Contender("DTensor", {"family": "dtensor", "shared": True}),
        ),
    ),
    Group(
        "single",
        (
            Contender("torch.compile", {"family": "torch", "compile": True}),
            Contender("zerofx", {"family": "zerofx", "stage": 0}),
            Contender("zerofx, 95 %", {"family": "zerofx", "stage": 0}, ("torch.compile",), 0.95),
            Contender("torch.compile, memory kept", {"family": "torch", "compile": True, "keep_freed": True}),
            Contender("eager", {"family": "torch"}),
        ),
        alone=True,
    ),
)


def selected(options: argparse.Namespace) -> Iterator[tuple[Group, list[Contender]]]:
    """The groups that were asked for, with those of their contenders that can be run; the baseline always."""
    for group in GROUPS:
        if group.name not in options.groups or (options.ranks == 1 and not group.alone):
            continue
        yield group, wanted(group, options.only)


def wanted(group: Group, only: Sequence[str]) -> list[Contender]:
    """The contenders whose name has one of these words, all if there are none, without DeepSpeed's where it is not
    installed; the baseline always."""
    missing = [row["name"] for row in absent(group)]
    baseline, *others = (contender for contender in group.contenders if contender.name not in missing)
    return [baseline, *(contender for contender in others if not only or any(word in contender.name for word in only))]


def absent(group: Group) -> list[dict[str, Any]]:
    """Rows of the contenders whose library is not installed, which say so."""
    if importlib.util.find_spec("deepspeed") is not None:
        return []
    facts = {"refused": "needs deepspeed, which is not installed"}
    return [
        {"name": contender.name, "chunk": 0, "rounds": [], "request": contender.request, "facts": facts}
        for contender in group.contenders
        if contender.request["family"] == "deepspeed"
    ]


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
    try:
        for contender in few:
            request = dict(contender.request)
            if contender.budget_of:
                known = [peaks[name] for name in contender.budget_of if name in peaks]
                if not known:
                    say(f"  {contender.name}: left out, the peaks that are its budget were not measured")
                    continue
                request["budget"] = int(min(known) * contender.budget_share)
            message = {"shape": options.shape, "device": options.device, "dtype": options.dtype, "contender": request}
            began = time.monotonic()
            ranks = Ranks(contender.name, "benchmarks.peers_worker", message, num_ranks, num_threads, cache)
            ready.append(ranks)
            row: dict[str, Any] = {
                "name": contender.name,
                "chunk": chunk,
                "rounds": [],
                "request": request,
                "facts": {},
            }
            results[contender.name] = row
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
    finally:
        for ranks in ready:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [group.name for group in GROUPS]
    parser.add_argument("--shape", choices=SHAPES, default="27m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="contenders whose name has one of these")
    parser.add_argument("--resume", action="store_true", help="leave out groups that have been measured")
    parser.add_argument("--ranks", type=int, help="processes (default: 2 on CPU, the GPUs there are on CUDA)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process; one process has those of all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each contender in a round")
    parser.add_argument("--together", type=int, help="contenders in memory at a time (default: what it has room for)")
    parser.add_argument(
        "--cache", type=Path, help="Inductor's cache (default: an empty one, so that compiling is cold)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of one step, of a tiny model")
    parser.add_argument("--report", action="store_true", help="only make tables and plot again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.shape, options.rounds, options.steps = "tiny", 1, 1
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    path = options.out / f"peers_{options.device}.json"
    if not options.report:
        with tempfile.TemporaryDirectory(prefix="peers-cache-") as empty:
            measure(options, path, options.cache or Path(empty))
    data = record(path, lambda _: None)
    text = peers_report.markdown(data)
    path.with_suffix(".md").write_text(text)
    print(text)
    if importlib.util.find_spec("matplotlib") is None:
        say("no plot: expected matplotlib, found none (pip install 'zerofx[benchmarks]')")
    else:
        peers_report.plot(data, path.with_suffix(".png"))


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


if __name__ == "__main__":
    main()
