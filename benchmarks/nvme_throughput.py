"""Throughput of the nvme tier's files compared with the drive's, in one run on the same folder.

    python -m benchmarks.nvme_throughput --folder /mnt/nvme

Both write and read as many bytes with the same block size and as many blocks under way at once, past the page cache.
What the drive gives is `fio`'s, where it is installed: of its engines the one that is fastest at writing here, and the
one that is fastest at reading. Else it is a loop of ``os.pwritev`` and ``os.preadv`` on as many threads. Neither
knows hashes, striping or tensors; the result says which it was. Rounds alternate between the two; ratios are of their
medians, and of the best rounds, which other programs have disturbed least. CPU time is that of all threads, the
system's work included.

Writes ``benchmarks/results/nvme_throughput.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from tqdm import tqdm

from benchmarks.lib.processes import RESULTS
from benchmarks.lib.turn import turn
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.runtime.tiers.nvme import BLOCK_BYTES, NUM_THREADS, NvmeFiles
from zerofx.runtime.tiers.nvme_folders import OwnFolder

DIRECTIONS = ("write", "read")

FIO_ENGINES = ("psync", "io_uring", "libaio")  # a thread for each block under way, or one that keeps all under way
NUM_TRIES = 2  # of each engine of fio, before the rounds


class Taken(NamedTuple):
    """Bytes per second, and CPU seconds of all threads per byte."""

    rate: float
    cpu_seconds: float


Round = dict[str, Taken]  # by direction


def timed(num_bytes: int, move: Callable[[], None]) -> Taken:
    """What it takes to ``move`` so many bytes in this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    move()
    return Taken(num_bytes / (time.perf_counter() - began), (time.process_time() - began_cpu) / num_bytes)


@contextlib.contextmanager
def ours(folder: Path, num_bytes: int) -> Iterator[Callable[[], Round]]:
    """The nvme tier's files: tensors of 64 MiB, hashed as they are written and checked as they are read."""
    each = min(num_bytes, 1 << 26)
    files, memory = NvmeFiles([folder]), HostMemory(pinned=False)
    blocks = [(files.take(each), memory.take(each)) for _ in range(num_bytes // each)]
    for number, (_, block) in enumerate(blocks):
        block.random_(0, 256, generator=torch.Generator().manual_seed(number))

    def move(direction: str) -> None:
        if direction == "write":
            transfers = [files.write(file, block, _nothing) for file, block in blocks]
        else:
            transfers = [files.read(file, block) for file, block in blocks]
        for transfer in transfers:
            transfer.result()

    def run() -> Round:
        return {direction: timed(each * len(blocks), partial(move, direction)) for direction in DIRECTIONS}

    try:
        yield run
    finally:
        files.close()


@contextlib.contextmanager
def plain_loop(folder: Path, num_bytes: int) -> Iterator[Callable[[], Round]]:
    """Blocks of one file, written and read by a pool of threads: nothing but the system's calls."""
    own = OwnFolder(folder)
    memory = HostMemory(pinned=False).take(num_bytes)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(0))
    view = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")
    path = own.path / "plain.bin"

    def move(direction: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | own.direct_flag, 0o600)
        call: Callable[..., int] = os.pwritev if direction == "write" else os.preadv

        def move_block(start: int) -> None:
            end = min(start + BLOCK_BYTES, num_bytes)
            while start < end:
                start += call(file, [view[start:end]], start)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(move_block, range(0, num_bytes, BLOCK_BYTES)))
        os.close(file)

    def run() -> Round:
        return {direction: timed(num_bytes, partial(move, direction)) for direction in DIRECTIONS}

    try:
        yield run
    finally:
        own.remove()


@contextlib.contextmanager
def fio(folder: Path, num_bytes: int) -> Iterator[Callable[[], Round]]:
    """`fio` with the same block size, and as many blocks under way."""
    own = OwnFolder(folder)
    try:
        tries = {engine: [_fio_round(own, engine, num_bytes) for _ in range(NUM_TRIES)] for engine in _fio_engines()}
        fastest = {
            direction: max(tries, key=lambda engine: max(attempt[direction].rate for attempt in tries[engine]))
            for direction in DIRECTIONS
        }
        print(f"fio's engines: {', '.join(f'{engine} to {direction}' for direction, engine in fastest.items())}")
        yield lambda: {direction: _fio(own, engine, direction, num_bytes) for direction, engine in fastest.items()}
    finally:
        own.remove()


def _fio_engines() -> list[str]:
    """The engines of ``FIO_ENGINES`` that this fio has."""
    listed = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=True).stdout.split()
    return [engine for engine in FIO_ENGINES if engine in listed]


def _fio_round(own: OwnFolder, engine: str, num_bytes: int) -> Round:
    return {direction: _fio(own, engine, direction, num_bytes) for direction in DIRECTIONS}


def _fio(own: OwnFolder, engine: str, direction: str, num_bytes: int) -> Taken:
    threads, depth = (NUM_THREADS, 1) if engine == "psync" else (1, NUM_THREADS)
    command = [
        "fio", f"--name={engine}", f"--rw={direction}", f"--directory={own.path}", f"--ioengine={engine}",
        f"--direct={int(bool(own.direct_flag))}", f"--bs={BLOCK_BYTES}", f"--numjobs={threads}", f"--iodepth={depth}",
        f"--size={num_bytes // threads}", f"--filename_format={engine}.$jobnum", "--thread", "--group_reporting",
        "--output-format=json", "--end_fsync=0",
    ]  # fmt: skip
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    # Shares of CPU time are of the threads' summed time, which is in milliseconds.
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Taken(float(job[direction]["bw_bytes"]), cpu_seconds / job[direction]["io_bytes"])


def measure(folder: Path, num_bytes: int, num_rounds: int) -> tuple[str, dict[str, list[Round]]]:
    """The name of the reference, and all rounds of both."""
    name, reference = ("fio", fio) if shutil.which("fio") else ("plain loop of pwritev and preadv", plain_loop)
    rounds: dict[str, list[Round]] = {name: [], "zerofx": []}
    with reference(folder, num_bytes) as theirs, ours(folder, num_bytes) as mine:
        theirs(), mine()  # the first writes of a file make it
        for _ in tqdm(range(num_rounds), "measuring", disable=None):
            rounds[name].append(theirs())
            rounds["zerofx"].append(mine())
    return name, rounds


def rows(reference: str, rounds: dict[str, list[Round]]) -> list[dict[str, float | str]]:
    """A row for each direction: medians in bytes per second, and the ratios of zerofx's to the reference's."""
    listed: list[dict[str, float | str]] = []
    for direction in DIRECTIONS:
        median = {
            name: statistics.median(attempt[direction].rate for attempt in attempts)
            for name, attempts in rounds.items()
        }
        best = {name: max(attempt[direction].rate for attempt in attempts) for name, attempts in rounds.items()}
        cpu = {
            name: statistics.median(attempt[direction].cpu_seconds for attempt in attempts)
            for name, attempts in rounds.items()
        }
        listed.append(
            {
                "direction": direction,
                "reference": median[reference],
                "zerofx": median["zerofx"],
                "ratio": median["zerofx"] / median[reference],
                "best_ratio": best["zerofx"] / best[reference],
                "reference_cpu_seconds_per_gb": 1e9 * cpu[reference],
                "zerofx_cpu_seconds_per_gb": 1e9 * cpu["zerofx"],
            }
        )
    return listed


def table(reference: str, results: list[dict[str, float | str]]) -> str:
    """The rows as Markdown."""
    listed = []
    for row in results:
        speeds = [f"{float(row[name]) / 1e6:.0f}" for name in ("reference", "zerofx")]
        cpu = [f"{float(row[f'{name}_cpu_seconds_per_gb']):.2f}" for name in ("reference", "zerofx")]
        listed.append([row["direction"], *speeds, f"{row['ratio']:.2f}", f"{row['best_ratio']:.2f}", *cpu])
    headers = ["", f"{reference}, MB/s", "zerofx, MB/s", "ratio of medians", "ratio of the best"]
    headers += [f"CPU s/GB, {reference}", "CPU s/GB, zerofx"]
    return tabulate(listed, headers=headers, tablefmt="github", disable_numparse=True)


def _nothing() -> None:
    """What there is to wait for before a write: the bytes are on the host."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive to measure; else the system's temporary folder")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.gettempdir())
    with turn(whole_machine=True):
        reference, rounds = measure(folder, options.megabytes << 20, options.rounds)
    listed = rows(reference, rounds)
    shown = table(reference, listed)
    print(shown)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {
        "reference": reference,
        "num_bytes": options.megabytes << 20,
        "block_bytes": BLOCK_BYTES,
        "num_threads": NUM_THREADS,
        "rows": listed,
        "rounds": rounds,
    }
    (options.out / "nvme_throughput.json").write_text(json.dumps(data, indent=1))
    (options.out / "nvme_throughput.md").write_text(shown + "\n")


if __name__ == "__main__":
    main()
