"""zerofx's kernels compared with those of torch and Inductor for the same work, in one run.

    python -m benchmarks.kernels                    # those for CUDA
    python -m benchmarks.kernels --device cpu       # those for CPUs, with this process's threads
    python -m benchmarks.kernels --groups update    # one of them

- **attention**, on a CPU: forward and backward in float32, of some shapes, causal, under a mask and without:
  ATen's operator and the kernel.
- **products**, on a CPU: a layer, the gradient of its input and that of its weight, in float32, of some sizes: ATen's
  BLAS, and what is taken from it. Operands go round, so that they come from memory.
- **update**: AdamW on one bucket with float32 masters and states, gradient and parameters in bfloat16: unscale, cast,
  update, copy. ATen's four kernels, the same arithmetic written out under ``torch.compile``, and the kernel.
- **loss**: an output layer with its cross-entropy, forward and backward, in bfloat16: whole logits under
  ``torch.compile``, torch's chunked ``linear_cross_entropy`` where torch has it, tiles of rows under ``torch.compile``,
  and tiles of classes.

Rounds alternate between the contenders of a group; times are of CUDA events, or of the clock on a CPU. Ratios are to
the group's first, of medians and of minima: a kernel is worth having below 1. "Of copy" is the share of a plain copy's
bytes a second, where all contenders are given the bytes that one pass has to move. Peak is what the allocator holds
beyond the inputs.

Writes ``benchmarks/results/kernels_<device>.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import groups_cpu, groups_cuda
from benchmarks.kernels.measure import copy_bandwidth, measure, rows, table
from benchmarks.kernels.names import CPU, CUDA
from benchmarks.lib.json_file import write_json
from benchmarks.lib.memory_kept import keep_freed_memory
from benchmarks.lib.processes import RESULTS, device_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--millions", type=int, default=128, help="elements of a bucket, in units of 2**20")
    parser.add_argument("--rows", type=int, default=8192, help="of the loss")
    parser.add_argument("--dim", type=int, default=4096, help="of the output layer's input")
    parser.add_argument("--classes", type=int, default=128_256)
    parser.add_argument("--groups", nargs="+", choices=(*CUDA, *CPU), help="(default: all of the device's)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device, numel = torch.device(options.device), options.millions << 20
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA GPU, found none: give --device cpu; nothing was measured, nothing written")
    if device.type == "cuda":
        name = device_name("cuda")
        makers = groups_cuda.groups(numel, options.rows, options.dim, options.classes, device)
    else:
        name = f"{device_name('cpu')}, {torch.get_num_threads()} threads"
        makers = groups_cpu.groups()
        keep_freed_memory()  # for all contenders alike: page faults are not what is compared
    names = options.groups or list(makers)
    if others := set(names) - set(makers):
        parser.error(f"expected groups of {', '.join(makers)} on {device}, found {', '.join(others)}")
    bandwidth = copy_bandwidth(numel, device, options.rounds)
    listed: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for make in (make for group in names for make in makers[group]):
        group = make()
        listed += rows(group, measure(group, options.rounds, device), bandwidth)
        print(table(listed[-len(group.contenders) :]), flush=True)
        del group
        torch.cuda.empty_cache()
        data = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": bandwidth, "rows": listed}
        write_json(options.out / f"kernels_{device.type}.json", data)
    (options.out / f"kernels_{device.type}.md").write_text(f"{name}, torch {torch.__version__}\n\n{table(listed)}\n")


if __name__ == "__main__":
    main()
