"""The headlines of ZeRO, ZeRO-Offload and ZeRO-Infinity on paper: their models on their machines, as zerofx plans them.

    python -m benchmarks.headlines                  # all rows, each planned in a process of its own
    python -m benchmarks.headlines --rows 13B 1T    # these alone; results of the others stay
    python -m benchmarks.headlines --rows           # the tables again, nothing is planned

A row is a GPT of the published number of parameters, on ``meta``, planned for the machine that was published: V100s of
32 GB in DGX-2s, 16 to a node. Nothing is computed, and nothing is measured but the
planner's own time and memory.

- **fp16 is counted at bf16.** zerofx trains in bf16, which a V100 has no units for: the machine's bfloat16 rate is the
  card's for float16, of which matrix products get 70 of 125 TFLOPS, as in ZeRO-Infinity (2104.07857, section 4).
  Attention is fused, as torch's is on a V100 in float16.
- **TFLOPS are what the papers count**: FLOPs that a step carries out, recomputation among them, over its seconds. They
  take 8 FLOPs for each parameter and token, recomputation of all activations among them; here it is what the plan
  computes, which is less where it keeps activations.
- **Shapes and batches** are chosen: layers and widths that give the published number of parameters, with a batch of the
  size that such runs have. Links and drives of a DGX-2 are in ``dgx2``, each with what it follows. Batches are of one
  GPU.
- **No model parallelism.** Where a paper divides layers among GPUs, a layer is gathered whole, or its huge matrices
  slice by slice (``tile=``).
- **What is too deep to plan whole** is planned for two numbers of layers, with as large a part of the host and the
  drives and in half of the device, where few layers would otherwise stay. Layers are alike: bytes and seconds are
  extended to all of them, linear in their number.

Writes ``benchmarks/results/headlines.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zerofx
from benchmarks.lib.alone import answer_alone
from benchmarks.lib.processes import RESULTS
from zerofx.progress import watch_progress
from zerofx.scheduler.cost.machine import Device, Efficiency, Host, Link, Machine, Nvme, Peaks
from zerofx.units import format_bytes, format_count, format_seconds

VOCABULARY, TOKENS = 50_257, 1024
GPUS = 16  # of a DGX-2
ACHIEVABLE = 70e12  # FLOP/s of a V100's matrix products in float16 (2104.07857, section 4)
_PEAK = 125e12  # NVIDIA V100 datasheet (SXM3), float16


def dgx2(*, gpus: int = GPUS) -> Machine:
    """A DGX-2 of which ``gpus`` are at work, with the links of 2104.07857: all sixteen share PCI Express.

    One GPU alone copies 12 GB/s, each of sixteen 3 GB/s; the drives hold 28 TB, and give and take 1.6 GB/s for each
    GPU; 800 Gbit/s lead to other nodes.
    """
    copies = Link(3e9 if gpus == GPUS else 12e9, 10e-6)
    drives = Link(GPUS * 1.6e9, 100e-6)
    return Machine(
        name=f"dgx-2, {gpus} of {GPUS} GPUs",
        source="NVIDIA V100 datasheet (SXM3), DGX-2 datasheet; links, drives and achievable FLOP/s: arXiv 2104.07857",
        device=Device(Peaks(15.7e12, bfloat16=_PEAK, float16=_PEAK), 900e9, 32 * 2**30, 4e-6),
        efficiency=Efficiency(matmul=ACHIEVABLE / _PEAK, memory=0.85, link=1.0),
        intra_node=Link(150e9, 3.4e-6),
        inter_node=Link(800e9 / 8 / GPUS, 9.6e-6),
        ranks_per_node=GPUS,
        # 2 sockets x 24 cores x 2.7 GHz x two AVX-512 units; 2 x 6 x DDR4-2666.
        host=Host(1536 * 2**30, 256e9, 48 * 2.7e9 * 64, copies, copies),
        nvme=Nvme(28 * 10**12, drives, drives),
    )


@dataclass(frozen=True)
class Headline:
    """A published result, and what is planned for it.

    ``tflops`` are the published ones for each GPU, None where a model was only said to train. ``sequences`` are those
    of one GPU. ``slices``: into how many parts each layer's matrices are cut, and the embedding, by name. ``planned``
    are the two numbers of layers that are planned where all of them are too many.
    """

    name: str
    paper: str
    billions: float
    tflops: float | None
    layers: int
    dim: int
    heads: int
    sequences: int
    gpus: int
    slices: Mapping[str, int] = field(default_factory=dict)
    embedding_slices: int = 1
    planned: tuple[int, int] | None = None

    @property
    def num_parameters(self) -> int:
        """Of the whole model: what layers have, and the embeddings."""
        layer = 12 * self.dim**2 + 13 * self.dim
        return self.layers * layer + (VOCABULARY + TOKENS + 2) * self.dim


_INFINITY, _OFFLOAD, _ZERO = "ZeRO-Infinity", "ZeRO-Offload", "ZeRO"
_MLP = {"mlp.up": 2, "mlp.out": 2}
HEADLINES = (
    Headline("13B", _OFFLOAD, 13, None, 65, 4096, 32, 8, 1),
    Headline("10B", _OFFLOAD, 10, 40, 50, 4096, 32, 10, 1),
    Headline("70B", _OFFLOAD, 70, 30, 69, 9216, 72, 8, GPUS),
    Headline("100B", _ZERO, 100, 38, 125, 8192, 64, 2, 400),
    Headline("100B on a node", _INFINITY, 100, 40, 125, 8192, 64, 24, GPUS),
    Headline("1T", _INFINITY, 1000, None, 128, 25_600, 256, 7, GPUS, _MLP),
    Headline("32T", _INFINITY, 32_000, None, 621, 65_536, 512, 1, 512,
             {"attention.qkv": 16, "attention.out": 4, "mlp.up": 16, "mlp.out": 16}, 16, (8, 12)),
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A plan in numbers, of one GPU; ``planner_seconds`` and ``planner_bytes`` are what it took to make it."""

    step_seconds: float
    exposed_seconds: float
    flops: float
    peak_bytes: dict[str, float]
    num_recomputed: float
    planner_seconds: float
    planner_cpu_seconds: float
    planner_bytes: int


def plan(headline: Headline, layers: int) -> Planned:
    """Plan ``layers`` of a headline's model, on as large a part of the host and the drives as they are of the model."""
    from gpt import GPT  # of the examples' folder, which workers have on their path

    began, cpu_began = time.perf_counter(), time.process_time()
    machine = part_of(dgx2(gpus=min(headline.gpus, GPUS)), layers / headline.layers)
    with torch.device("meta"):
        model = GPT(VOCABULARY, headline.dim, layers, headline.heads, TOKENS)
        ids = torch.zeros(headline.sequences, TOKENS, dtype=torch.long)
    names = {f"layers.{n}.{name}.weight": k for n in range(layers) for name, k in headline.slices.items()}
    if headline.embedding_slices > 1:
        names["tokens.weight"] = headline.embedding_slices
    planned = zerofx.plan(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"tokens": ids, "targets": ids}, stage=3,
        world_size=headline.gpus, machine=machine, precision="bf16", tile=names or "auto",
        memory_budget=1.0 if headline.planned is None else 0.5,
    )  # fmt: skip
    if not planned.fits:
        raise RuntimeError(f"{headline.name} with {layers} layers does not fit: {planned}")
    prediction = planned.plan.prediction
    assert prediction is not None, "what is planned on paper has been simulated"
    return Planned(
        step_seconds=prediction.step_seconds,
        exposed_seconds=prediction.exposed_seconds,
        flops=prediction.flops,
        peak_bytes={tier: float(size) for tier, size in prediction.peak_bytes.items()},
        num_recomputed=len(planned.plan.recomputes),
        planner_seconds=time.perf_counter() - began,
        planner_cpu_seconds=time.process_time() - cpu_began,
        planner_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def part_of(machine: Machine, part: float) -> Machine:
    """``machine`` with that part of its host memory and of its drives."""
    assert machine.nvme is not None
    host = replace(machine.host, memory_bytes=int(part * machine.host.memory_bytes))
    return replace(machine, host=host, nvme=replace(machine.nvme, num_bytes=int(part * machine.nvme.num_bytes)))


def extended(short: Planned, long: Planned, at: tuple[int, int], layers: int) -> Planned:
    """The plan of ``layers`` layers, given those of ``at`` layers: linear in their number but on the device, whose
    memory is the budget of both, and in what planning took."""

    def beyond(first: float, second: float) -> float:
        return first + (second - first) / (at[1] - at[0]) * (layers - at[0])

    tiers = short.peak_bytes.keys() | long.peak_bytes.keys()
    peaks = {tier: beyond(short.peak_bytes.get(tier, 0.0), long.peak_bytes.get(tier, 0.0)) for tier in sorted(tiers)}
    return Planned(
        step_seconds=beyond(short.step_seconds, long.step_seconds),
        exposed_seconds=beyond(short.exposed_seconds, long.exposed_seconds),
        flops=beyond(short.flops, long.flops),
        peak_bytes={**peaks, "device": max(short.peak_bytes["device"], long.peak_bytes["device"])},
        num_recomputed=beyond(short.num_recomputed, long.num_recomputed),
        planner_seconds=max(short.planner_seconds, long.planner_seconds),
        planner_cpu_seconds=max(short.planner_cpu_seconds, long.planner_cpu_seconds),
        planner_bytes=max(short.planner_bytes, long.planner_bytes),
    )


def efficiencies(headline: Headline, machine: Machine, *, on_drives: bool) -> dict[str, float]:
    """The part of ``ACHIEVABLE`` that is left by ZeRO-Infinity's formulas, with nothing overlapped, by what is moved.

    Arithmetic intensity (FLOPs for each byte of one GPU) times bandwidth, over that and the achievable FLOP/s. Of
    parameters and gradients each GPU moves its own part of all over its link to the host, and gathers the rest; of
    optimizer states its own part, from the drives.
    """
    assert machine.nvme is not None
    tokens = headline.sequences * TOKENS
    copies = machine.host.to_device.bandwidth * headline.gpus
    drives = machine.nvme.read.bandwidth / machine.ranks_per_node * headline.gpus
    network = machine.intra_node.bandwidth if headline.gpus <= GPUS else GPUS * machine.inter_node.bandwidth
    moved = {
        "parameters, gradients": (tokens, min(copies, network) if headline.gpus > 1 else copies),
        "optimizer states": (tokens / 4, drives if on_drives else copies),
        "activations": (24 * headline.dim, machine.host.to_host.bandwidth),
    }
    return {what: bandwidth_efficiency(ait, bandwidth, ACHIEVABLE) for what, (ait, bandwidth) in moved.items()}


def bandwidth_efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Part of ``peak`` FLOP/s that is left where each byte, moved at ``bandwidth`` a second, is for ``intensity`` FLOPs
    and nothing overlaps (2104.07857, section 4)."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def in_process(headline: Headline, layers: int) -> Planned:
    """``plan`` in a process of its own, whose memory is its alone."""
    what = f"{headline.name} with {layers} layers"
    return Planned(**answer_alone(what, "benchmarks.headlines", "--here", headline.name, str(layers)))


def of(headline: Headline) -> Planned:
    """The whole model's plan, or what two plans of fewer layers extend to."""
    if headline.planned is None:
        return in_process(headline, headline.layers)
    short, long = (in_process(headline, layers) for layers in headline.planned)
    return extended(short, long, headline.planned, headline.layers)


def table(results: Mapping[str, Planned]) -> str:
    """The rows that there are, as Markdown."""
    rows = []
    for headline in HEADLINES:
        planned = results.get(headline.name)
        if planned is None:
            continue
        on_drives = planned.peak_bytes.get("nvme", 0) > 0
        left = efficiencies(headline, dgx2(gpus=min(headline.gpus, GPUS)), on_drives=on_drives)
        where = "1 V100" if headline.gpus == 1 else f"{headline.gpus} V100s"
        whole = "" if headline.planned is None else f", planned at {headline.planned[0]} and {headline.planned[1]}"
        rows.append([
            f"{headline.name}, {headline.paper}, {where}",
            f"{headline.billions:,}B",
            f"{format_count(headline.num_parameters)}: {headline.layers} layers of {headline.dim}{whole}",
            headline.tflops or "",
            f"{planned.flops / planned.step_seconds / 1e12:.1f}",
            " / ".join(f"{ACHIEVABLE * part / 1e12:.1f}" for part in left.values()),
            f"{format_seconds(planned.step_seconds)} ({format_seconds(planned.exposed_seconds)})",
            " / ".join(format_bytes(planned.peak_bytes.get(tier, 0)) for tier in ("device", "host", "nvme")),
            f"{planned.planner_cpu_seconds:.0f} s, {planned.planner_seconds:.0f} s",
            format_bytes(planned.planner_bytes),
        ])  # fmt: skip
    headers = [
        "headline", "published", "planned", "TFLOPS a GPU: published", "planned",
        "by formula, nothing overlapped: parameters / states / activations", "step (exposed)",
        "peak of a GPU: device / host / nvme",
        "planner: CPU time, wall time",
        "memory",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def bandwidths() -> str:
    """The efficiencies that ZeRO-Infinity reads off its formulas, as Markdown."""
    points = [
        ("parameters and gradients, a sequence of 1024 tokens a GPU", 1024, 70e9, "over 50 %"),
        ("optimizer states, two sequences a GPU", 2 * 1024 / 4, 1.5e12, "about 90 %"),
        ("activations of 2,048", 24 * 2048, 2e9, "over 50 %"),
        ("activations of 8,192", 24 * 8192, 3e9, "over 80 %"),
    ]
    rows = [
        [what, f"{rate / 1e9:,.0f} GB/s", published, f"{100 * bandwidth_efficiency(ait, rate, ACHIEVABLE):.1f} %"]
        for what, ait, rate, published in points
    ]
    headers = ["what is moved", "bandwidth", "efficiency: published", "by formula"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[headline.name for headline in HEADLINES], help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", nargs=2, metavar=("ROW", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {headline.name: headline for headline in HEADLINES}
    if options.here:
        name, layers = options.here
        print(json.dumps(asdict(plan(by_name[name], int(layers)))))
        return
    path = options.out / "headlines.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {name: Planned(**earlier[name]) for name in by_name if name in earlier}
    names = list(by_name) if options.rows is None else options.rows
    with watch_progress("planning headlines", "rows", len(names)) as bar:
        for name in names:
            bar.set_description(f"planning {name}", refresh=False)
            results[name] = of(by_name[name])
            bar.update()
            _write(results, path)
    _write(results, path)
    shown = f"{table(results)}\n\n{bandwidths()}"
    print(shown)
    (options.out / "headlines.md").write_text(shown + "\n")


def _write(results: Mapping[str, Planned], path: Path) -> None:
    """Write ``results`` in the order of ``HEADLINES``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [headline.name for headline in HEADLINES if headline.name in results]
    path.write_text(json.dumps({name: asdict(results[name]) for name in names}, indent=1))


if __name__ == "__main__":
    main()
