"""Saving and loading a whole training state: zerofx, DCP on FSDP2, DeepSpeed, and plain writes and reads, in one run.

    python -m benchmarks.checkpoints                              # a GPT of 110M, 1 and 2 ranks
    python -m benchmarks.checkpoints --shape 27m --rounds 2       # short

Each contender is trained with AdamW in fp32 in processes of its own; rounds go through all of them in turn. In a round
each saves, and loads what it has saved after the system's page cache has let go of it; the folder is removed
again. Seconds are those of the slowest rank, from a meeting of all. The reference writes as many bytes a rank from
memory, to as many files in blocks of 16 MiB, with as many ``fsync``, and reads them back to memory.

Bytes of memory are what is resident at the most while a rank saves, or loads, above what was resident before it. With
states on nvme, all that a plan can put there is: the least memory budget that can be met is given.

``asynchronous`` compares the steps that run while a checkpoint is written with steps between two checkpoints.

Writes ``benchmarks/results/checkpoints.json`` and a Markdown table. DeepSpeed takes part where it can be imported
(``pip install deepspeed``); it does not sync its files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.checkpoints.measure import WHAT, conclusion, measure, table
from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import RESULTS, device_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="110m")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="a load follows a save")
    parser.add_argument("--folder", type=Path, help="on the drive to measure; else the system's temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    groups = [measure(num_ranks, options) for num_ranks in options.ranks]
    about = (
        f"{device_name('cpu')}, torch {torch.__version__}, a GPT ({options.shape}), {options.threads} thread(s) a rank"
    )
    text = f"{about}\n\n{table(groups)}\n\n{conclusion(groups)}\n"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "checkpoints.json", {"about": about, "groups": groups})
    (options.out / "checkpoints.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
