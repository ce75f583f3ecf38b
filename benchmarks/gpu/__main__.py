"""All that there is to run on a GPU, the most telling first, within one time: ``make gpu``.

    python -m benchmarks.gpu                                    # ends by itself after 560 seconds
    python -m benchmarks.gpu --continue earlier/gpu.json        # what has not run yet of the same code
    python -m benchmarks.gpu --only 1b capped                   # cases whose name has one of these
    python -m benchmarks.gpu --device cpu --sizes tiny          # the same code without a GPU

Several cases import, capture, plan and compile at once; one at a time holds the device for its timing, and stops the
others where host or links are timed, too. ``--out`` has ``gpu.json``, written whenever a case has ended, and
``gpu.log``. What the machine lacks is a line of the result. ``python -m benchmarks.gpu.report`` makes tables of it.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import ROOT, Entry
from benchmarks.gpu.case_list import cases
from benchmarks.gpu.code import code_hash, commit_of
from benchmarks.gpu.record import Record, ran_before
from benchmarks.gpu.run import run, scratch
from benchmarks.gpu.setup import SIZES, Setup, machine_facts


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--until", type=float, default=560.0, help="seconds in which all has ended (default: 560)")
    parser.add_argument("--continue", type=Path, dest="earlier", metavar="FILE", help="results to go on from")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--together", type=int, default=3, help="cases under way at a time (default: %(default)s)")
    parser.add_argument("--drive", type=Path, help="folder on NVMe (default: one of the system's temporary folder)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options.out.mkdir(parents=True, exist_ok=True)
    drive = options.drive or scratch() / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    code = code_hash()
    facts: dict[str, Any] = {"device": options.device, "sizes": options.sizes, "code": code, "machine": {}}
    before = ran_before(options.earlier, facts) if options.earlier else {}
    record = Record(options.out, facts)
    record.entries.update(before)
    record.write()  # there is a file from here on, whatever ends this process
    known: dict[str, Any] = {"code": code, "commit": commit_of(code)}
    setup = Setup(options.device, SIZES[options.sizes], machine_facts(), drive)
    record.add_facts(commit=known["commit"], machine=setup.machine)
    if setup.no_device:
        record.entries["all"] = Entry("all", "tests", "lacking", setup.no_device, **known)
        record.write()
    else:
        asked = [case for case in cases(setup) if not options.only or any(word in case.name for word in options.only)]
        todo = [case for case in asked if case.name not in before]
        run(setup, record, todo, began + options.until, options.together, known)
    if options.drive is None:
        shutil.rmtree(drive)
    from benchmarks.gpu.summary import summary  # imports torch, which nothing is to wait for

    print(summary(record.entries.values(), time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
