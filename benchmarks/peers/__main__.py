"""zerofx compared with its peers in one run: DDP, FSDP2, DTensor and DeepSpeed, eager, compiled and checkpointed.

    python -m benchmarks.peers                        # a GPT of 27M on two gloo ranks of one thread: about ten minutes
    python -m benchmarks.peers --shape 110m           # the same of 110M; or llama, a Llama of transformers
    python -m benchmarks.peers --groups sharded       # or accumulated, evaluated, replicated, shared, single
    python -m benchmarks.peers --groups "two axes" --ranks 4   # DTensor's tensor parallelism with FSDP2
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
import tempfile
from pathlib import Path

import torch

from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import RESULTS
from benchmarks.peers import report
from benchmarks.peers.groups import GROUPS
from benchmarks.peers.measure import measure, record, say


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
    text = report.markdown(data)
    path.with_suffix(".md").write_text(text)
    print(text)
    if importlib.util.find_spec("matplotlib") is None:
        say("no plot: expected matplotlib, found none (pip install 'zerofx[benchmarks]')")
    else:
        report.plot(data, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
