"""All that there is to run on a GPU, in parts that each end within a time: ``make gpu``.

    python -m benchmarks.gpu                        # all parts, one after the other
    python -m benchmarks.gpu train memory           # some
    python -m benchmarks.gpu memory --only 1b       # cases whose name has one of these
    python -m benchmarks.gpu --device cpu --sizes tiny train     # the same code without a GPU

Each part writes ``<part>.json`` and ``<part>.log`` to ``--out`` as it goes. Cases that ran there before, with the same
code, are not run again: a part that was cut off goes on where it was. What the machine lacks is a line of the result.
``python -m benchmarks.gpu.report`` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.case import ROOT, Case, Entry
from benchmarks.gpu.part import Cases, Record, code_hash, machine_facts, run_part
from benchmarks.gpu.setup import SIZES, Setup

# The most telling first; each has a module of this name with its cases.
PARTS: Mapping[str, str] = {
    "tests": "the tests that need a GPU",
    "train": "losses next to plain torch's",
    "memory": "predicted and measured peaks within budgets",
    "speed": "step time next to torch.compile, and under a cap next to other libraries",
    "kernels": "own kernels next to Inductor's and torch's",
    "offload": "the largest model that trains, with host and NVMe",
    "measure": "Machine.measure(), and predicted next to measured step times",
}


def cases_of(part: str) -> Cases:
    """The cases of a part, whose module is imported with the first: it may fail, which is then the part's."""

    def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
        yield from import_module(f"benchmarks.gpu.parts.{part}").cases(setup, entries)

    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--seconds", type=float, default=480.0, help="for each part (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--drive", type=Path, help="folder on NVMe (default: a folder in --out)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these")
    parser.add_argument("--fresh", action="store_true", help="run again what ran before")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"expected parts of {', '.join(PARTS)}, found {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cases end with this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options.out.mkdir(parents=True, exist_ok=True)
    drive = options.drive or options.out / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    machine = machine_facts()
    setup = Setup(options.device, SIZES[options.sizes], machine, drive)
    facts = {"device": options.device, "sizes": options.sizes, "code": code_hash(), "machine": machine}
    failed = False
    for part in options.parts or PARTS:
        record = Record(part, options.out)
        if options.fresh:
            record.path.unlink(missing_ok=True)
        try:
            run_part(record, setup, cases_of(part), facts, options.seconds, tuple(options.only))
        except Exception:  # noqa: BLE001  # the record has it; the other parts are still worth their time
            traceback.print_exc()
            failed = True
    if options.drive is None:
        shutil.rmtree(drive)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
