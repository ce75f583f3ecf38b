"""The largest GPT that trains within a cap of memory: plain AdamW, DeepSpeed, and zerofx from the drive.

    python -m benchmarks.largest_trainable --folder /mnt/nvme

A size is trained for two steps in a process of its own, whose resident memory is held to the cap: the kernel's
high-water mark is read many times a second and once more at the end, and a process that was over it at any time is
killed, or has failed. Python, torch and the contender's libraries are in the cap with everything else.

The largest is searched for by the number of layers, and by the width of a few layers, which is harder: no layer can
then be smaller than another. A search begins where memory is expected to end (for plain AdamW by the plan of the same
step, for zerofx at the multiple of plain AdamW's that is asked for, or where its plan ends to fit), grows or shrinks
from there, and bisects between what trains and what does not, until these are close or its time is up.

DeepSpeed takes part where it can be imported (docs/benchmarks.md). Writes ``largest_trainable.json`` and a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.largest_trainable.search import WIDTH_UNIT, Axis, run, table
from benchmarks.lib.processes import RESULTS, ROOT
from zerofx.units import parse_bytes


def main() -> None:
    sys.path.append(str(ROOT / "examples"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a local drive")
    parser.add_argument("--cap", default="2GiB", help="resident memory of a trial (default: %(default)s)")
    parser.add_argument("--by", nargs="+", choices=["layers", "width"], default=["layers", "width"])
    parser.add_argument("--dim", type=int, default=1024, help="width of the layers that are counted")
    parser.add_argument("--depth", type=int, default=4, help="layers of the model that grows wide")
    parser.add_argument("--at-least", type=float, default=10.0, help="times plain AdamW's, where zerofx begins")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each search, after which no trial begins")
    parser.add_argument("--patience", type=float, default=15.0, help="minutes that a trial may take")
    parser.add_argument("--only", nargs="+", help="of the contenders, besides plain AdamW")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    contenders = ["plain AdamW", "AdamW in backward", "zerofx"]
    if importlib.util.find_spec("deepspeed") is not None:
        contenders.insert(2, "DeepSpeed ZeRO-3")
    contenders = [name for name in contenders if not options.only or name in {"plain AdamW", *options.only}]
    cap, texts, data = parse_bytes(options.cap), [], []
    for name in options.by:
        axis = (
            Axis("layers", 1, options.dim)
            if name == "layers"
            else Axis(f"width / {WIDTH_UNIT}", WIDTH_UNIT, options.depth)
        )
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="largest-") as folder:
            searches = run(axis, options, contenders, Path(folder))
        data += [{**asdict(search), "fixed": axis.fixed} for search in searches]
        what = f"Layers of width {axis.fixed}" if name == "layers" else f"The width of {axis.fixed} layers"
        texts.append(f"{what}:\n\n{table(searches, cap)}\n")
        print(texts[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "largest_trainable.json").write_text(json.dumps({"cap_bytes": cap, "searches": data}, indent=1))
    (options.out / "largest_trainable.md").write_text("\n".join(texts))


if __name__ == "__main__":
    main()
