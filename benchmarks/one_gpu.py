"""One device: zerofx compared with torch.compile, and under a memory cap with other libraries that offload states.

    python -m benchmarks.one_gpu                                    # a Llama of 1.1B in bf16 on a GPU
    python -m benchmarks.one_gpu --shape llama-8b-8 --groups whole  # 8 of the 32 layers of an 8B
    python -m benchmarks.one_gpu --device cpu --shape tiny --rounds 1 --steps 1     # the same code without a GPU

Two groups of contenders, each of processes that live side by side and run steps in turn (A B C A B C):

- *whole*: everything is on the device. torch.compile with fused AdamW, and zerofx; both also with CUDA graphs.
- *capped*: a process has ``--cap`` bytes of the device (by default half of what torch.compile took), fp32 masters on
  the host, computation in bf16. FSDP2 with CPU offload and DeepSpeed ZeRO-Offload, also with blocks checkpointed, and
  zerofx with a memory budget of 95 % of the cap, which leaves the allocator some room. A cap is enforced on CUDA alone.

Writes ``benchmarks/results/one_gpu.json``, as it goes, and a Markdown table with what is held to (at most 0.95 of
torch.compile's time, at most 0.5 of the better offload's, peaks within 2 % of what was predicted). What runs out of
memory is listed with its error; DeepSpeed takes part where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import RESULTS
from benchmarks.peers.groups import Contender, Group, absent, wanted
from benchmarks.peers.measure import describe_machine, measure_group, say
from benchmarks.peers.report import Row, reason, rows, table
from zerofx.units import parse_bytes

COMPILED = "torch.compile"
CAP_SHARE = 0.5  # of torch.compile's peak
BUDGET_SHARE = 0.95  # of the cap: blocks of the allocator are not filled to the last byte
FASTER, OFFLOADED, PREDICTED = 0.95, 0.5, 0.02


def whole(device: str, backend: str = "inductor") -> Group:
    """All on the device; CUDA graphs where there are some."""
    graphs = (
        Contender("torch.compile, CUDA graphs", {"family": "torch", "compile": True, "mode": "reduce-overhead"}),
        Contender("zerofx, CUDA graphs", {"family": "zerofx", "stage": 0, "cuda_graphs": True}),
    )
    contenders = (
        Contender(COMPILED, {"family": "torch", "compile": True}),
        Contender("zerofx", {"family": "zerofx", "stage": 0, "backend": backend}),
        *(graphs if device == "cuda" else ()),
    )
    return Group("whole", contenders, alone=True)


def capped(cap_bytes: int, *, mixed: bool, backend: str = "inductor") -> Group:
    """States on the host, within ``cap_bytes`` of the device. ``mixed``: computation in bf16, masters in fp32."""
    common = {"cap": cap_bytes, "mixed": mixed}
    fsdp2 = {"family": "fsdp2", "compile": True, "offload": True, **common}
    deepspeed = {"family": "deepspeed", "offload": True, **common}
    budget = int(BUDGET_SHARE * cap_bytes)
    ours = {"family": "zerofx", "stage": 3, "offload": "host", "budget": budget, "backend": backend, **common}
    contenders = (
        Contender("FSDP2 + CPU offload + checkpoint", {**fsdp2, "checkpoint": True}),  # fits in the least
        Contender("FSDP2 + CPU offload", fsdp2),
        Contender("DeepSpeed ZeRO-Offload", {**deepspeed, "stage": 2}),
        Contender("DeepSpeed ZeRO-Offload + checkpoint", {**deepspeed, "stage": 2, "checkpoint": True}),
        Contender("DeepSpeed ZeRO-3 offload + checkpoint", {**deepspeed, "stage": 3, "checkpoint": True}),
        Contender("zerofx, capped", ours),
    )
    return Group("capped", contenders, alone=True)


@dataclass(frozen=True)
class Verdict:
    """Something held to: what was measured of it, and the most that it may be."""

    what: str
    measured: float
    at_most: float

    @property
    def met(self) -> bool:
        return self.measured <= self.at_most


def verdicts(listed: dict[str, list[Row]], *, on_cpu: bool) -> list[Verdict]:
    """What is held to, as far as both sides have run; ``listed`` are the rows of each group.

    ``on_cpu``: what is on the host is measured with the device's own, whose memory it is.
    """
    judged = []
    fits = {row.name: row for row in listed.get("whole", [])}
    tight = {row.name: row for row in listed.get("capped", [])}
    for name, row in fits.items():
        if name.startswith("zerofx") and COMPILED in fits:
            judged.append(Verdict(f"time: {name} / {COMPILED}", row.ratio / fits[COMPILED].ratio, FASTER))
    peers = {name: row.ratio for name, row in tight.items() if not name.startswith("zerofx")}
    if peers and "zerofx, capped" in tight:
        better = min(peers, key=lambda name: peers[name])
        judged.append(
            Verdict(f"time: zerofx, capped / {better}", tight["zerofx, capped"].ratio / peers[better], OFFLOADED)
        )
    for name, row in (*fits.items(), *(() if on_cpu else tight.items())):
        # What runs in CUDA graphs allocates nothing that could be seen.
        if row.predicted_peak_bytes and "graphs" not in name:
            off = abs(row.peak_bytes / row.predicted_peak_bytes - 1)
            judged.append(Verdict(f"peak: {name}, measured / predicted", off, PREDICTED))
    return judged


def markdown(data: dict[str, Any]) -> str:
    """A table for each group, what could not run and why, and what is held to."""
    machine = data["machine"]
    parts = [f"{data['shape']}, {data['dtype']} on {machine['name']}, torch {machine['torch']}\n"]
    listed = {name: rows(group) for name, group in data["groups"].items()}
    for name, group in data["groups"].items():
        cap = f", within {group['cap_bytes'] / 1e9:.3g} GB" if group.get("cap_bytes") else ""
        parts.append(f"## {name}{cap}\n\n{table(listed[name])}\n")
        missing = [
            f"- {contender['name']}: {reason(contender)}" for contender in group["contenders"] if reason(contender)
        ]
        parts += ["\n".join(missing) + "\n"] if missing else []
    held = verdicts(listed, on_cpu=data["device"] == "cpu")
    cells = [
        [verdict.what, f"{verdict.measured:.3f}", f"{verdict.at_most:.2f}", "yes" if verdict.met else "no"]
        for verdict in held
    ]
    parts.append(tabulate(cells, ["held to", "measured", "at most", "met"], tablefmt="github", disable_numparse=True))
    return "\n".join(parts) + "\n"


def run(options: argparse.Namespace, cache: Path, path: Path) -> None:
    """Measure the groups that are asked for, one after the other, and write to ``path`` what is known so far."""
    data: dict[str, Any] = {
        "machine": describe_machine(options),
        "shape": options.shape,
        "dtype": options.dtype,
        "device": options.device,
        "groups": {},
    }

    def measure(group: Group, asked: argparse.Namespace, facts: dict[str, Any]) -> list[dict[str, Any]]:
        def note(results: list[dict[str, Any]]) -> None:
            data["groups"][group.name] = {"num_ranks": 1, **facts, "contenders": results + absent(group)}
            write_json(path, data)

        results = measure_group(asked, group, wanted(group, options.only), cache, note)
        note(results)
        return results

    peak = None
    if "whole" in options.groups:
        results = measure(whole(options.device, options.backend), options, {})
        peak = next((result["facts"].get("peak_bytes") for result in results if result["name"] == COMPILED), None)
    if "capped" not in options.groups:
        return
    if options.cap:
        cap = parse_bytes(options.cap)
    elif peak is not None:
        cap = int(CAP_SHARE * peak)
    else:
        say(f"no cap: {COMPILED}, of whose peak it is {CAP_SHARE:.0%}, has not run; give --cap")
        return
    masters = argparse.Namespace(**{**vars(options), "dtype": "float32"})
    if options.device == "cuda" and not options.together:
        masters.together = max(2, int(0.85 * torch.cuda.mem_get_info()[0] / cap))
    measure(capped(cap, mixed=options.dtype == "bfloat16", backend=options.backend), masters, {"cap_bytes": cap})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: bfloat16, on a CPU float32)")
    parser.add_argument("--cap", help="device memory of a process, as 40GB (default: half of torch.compile's peak)")
    parser.add_argument("--groups", nargs="+", choices=("whole", "capped"), default=("whole", "capped"))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="contenders whose name has one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each contender in a round")
    parser.add_argument("--threads", type=int, help="of each process (default: 1 on a CPU, else all cores)")
    parser.add_argument("--together", type=int, help="contenders in memory at a time (default: what it has room for)")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor", help="of zerofx's regions")
    parser.add_argument("--at-once", action="store_true", help="contenders are built at the same time")
    parser.add_argument(
        "--ready-again", action="store_true", help="each has a cache of its own, and is built a second time with it"
    )
    parser.add_argument("--cache", type=Path, help="Inductor's cache (default: an empty one)")
    parser.add_argument("--report", action="store_true", help="only make the table again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.ranks = 1
    options.threads = options.threads or (len(os.sched_getaffinity(0)) if options.device == "cuda" else 1)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    path = options.out / "one_gpu.json"
    if not options.report:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="one-gpu-cache-") as empty:
            run(options, options.cache or Path(empty), path)
    text = markdown(json.loads(path.read_text()))
    path.with_suffix(".md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
