"""Saving and loading of each contender measured in turn, and their table."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from benchmarks.lib.processes import Ranks

PLAIN, NVME = "plain writes and reads", "zerofx, states on nvme"


CONTENDERS: dict[str, dict[str, Any]] = {
    PLAIN: {"family": "plain"},
    "zerofx": {"family": "zerofx", "stage": 3},
    NVME: {"family": "zerofx", "stage": 3, "nvme": True},
    "FSDP2, DCP": {"family": "fsdp2"},
    "DeepSpeed ZeRO-3": {"family": "deepspeed", "stage": 3},
}


WHAT = ("save", "load", "asynchronous")


MIB = 1 << 20


def measure(num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all contenders on ``num_ranks`` ranks."""
    here = [
        name
        for name, request in CONTENDERS.items()
        if request["family"] != "deepspeed" or importlib.util.find_spec("deepspeed") is not None
    ]
    group: dict[str, Any] = {"num_ranks": num_ranks, "contenders": {}}
    running: dict[str, Ranks] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
        try:
            for name in here:
                (Path(folder) / name).mkdir()
                request = {
                    "shape": options.shape, "contender": CONTENDERS[name], "folder": str(Path(folder) / name),
                }  # fmt: skip
                title = f"{name}, {num_ranks} rank(s)"
                variables = {"ZEROFX_NVME_DIR": str(Path(folder) / name)}
                running[name] = Ranks(
                    title, "benchmarks.checkpoints.worker", request, num_ranks, options.threads, variables=variables
                )
                group["contenders"][name] = {"facts": running[name].read(), "rounds": []}
            for _ in tqdm(range(options.rounds + 1), f"{num_ranks} rank(s)", disable=None):
                for name, ranks in running.items():
                    answer = {}
                    for what in options.what:
                        if what != "asynchronous" or CONTENDERS[name]["family"] == "zerofx":
                            ranks.send(what)
                            answer[what] = ranks.read()
                    group["contenders"][name]["rounds"].append(answer)
                    for place in Path(folder, name).glob("saved*"):
                        shutil.rmtree(place)
        finally:
            for ranks in running.values():
                ranks.close()
    return group


def seconds(contender: dict[str, Any], what: str) -> list[float]:
    """Those of the slowest rank, round by round; the first round warms up."""
    return [max(rank["seconds"] for rank in answer[what]) for answer in contender["rounds"][1:]]


def more_bytes(contender: dict[str, Any], what: str) -> int:
    """The most of all ranks and rounds that was resident above what was before."""
    return max(int(rank["more_bytes"]) for answer in contender["rounds"][1:] for rank in answer[what])


def rows(groups: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each contender and number of ranks."""
    for group in groups:
        plain = group["contenders"][PLAIN]
        for name, contender in group["contenders"].items():
            listed = [f"{name}, {group['num_ranks']} rank{'s' if group['num_ranks'] > 1 else ''}"]
            for what in ("save", "load"):
                ours, theirs = seconds(contender, what), seconds(plain, what)
                listed += [
                    f"{statistics.median(ours):.2f}",
                    f"{statistics.median(ours) / statistics.median(theirs):.2f}",
                    f"{min(ours) / min(theirs):.2f}",
                    f"{more_bytes(contender, what) / MIB:.0f}",
                ]
            facts = contender["facts"][0]
            listed += [f"{facts['bucket_bytes'] / MIB:.0f}" if "bucket_bytes" in facts else ""]
            yield listed


def table(groups: list[dict[str, Any]]) -> str:
    """All rows as Markdown."""
    headers = ["", "save s", "over plain", "of the fastest", "MiB more"]
    headers += ["load s", "over plain", "of the fastest", "MiB more", "largest bucket, MiB"]
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(list(rows(groups)), headers, tablefmt="github", disable_numparse=True, colalign=align)


def share(ranks: list[dict[str, Any]], clock: int) -> float:
    """What steps take more while a checkpoint is written, of the slowest rank, as a share; ``clock``: wall 0, CPU 1."""
    during, between = (
        [max(times) for times in zip(*([each[clock] for each in rank[which]] for rank in ranks), strict=True)]
        for which in ("during", "between")
    )
    return float(sum(during) / (len(during) * statistics.median(between)) - 1)


def conclusion(groups: list[dict[str, Any]]) -> str:
    """What saving asynchronously costs, and what is missing, in words."""
    lines = []
    for group in groups:
        for name, contender in group["contenders"].items():
            if "asynchronous" not in contender["rounds"][0]:
                continue
            wall, cpu = (
                [share(answer["asynchronous"], clock) for answer in contender["rounds"][1:]] for clock in (0, 1)
            )
            lines.append(
                f"- {name}, {group['num_ranks']} rank(s): steps take {statistics.median(wall):+.1%} while a checkpoint "
                f"is written asynchronously ({min(wall):+.1%} to {max(wall):+.1%}); CPU time of the thread that runs "
                f"them {statistics.median(cpu):+.1%} ({min(cpu):+.1%} to {max(cpu):+.1%})"
            )
    if importlib.util.find_spec("deepspeed") is None:
        lines.append("- DeepSpeed is not installed here, and took no part.")
    return "\n".join(lines)
