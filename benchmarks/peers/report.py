"""The measurements of ``benchmarks/peers/`` as ratios, compared with their targets, as Markdown and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tabulate import tabulate

MATMUL = "matmul"


@dataclass(frozen=True)
class Target:
    """What ``ours`` may need at most of what ``peer`` needs, of the same group."""

    ours: str
    peer: str
    measure: Literal["time", "peak"]
    at_most: float


TARGETS = (
    Target("zerofx stage 3", "FSDP2 + compile", "time", 0.65),
    Target("zerofx stage 3", "DeepSpeed ZeRO-3", "time", 0.5),
    Target("zerofx stage 3", "FSDP2", "time", 0.6),
    Target("zerofx stage 3, 70 %", "FSDP2 + compile", "time", 0.65),
    Target("zerofx stage 3, 70 %", "FSDP2 + compile", "peak", 0.70),
    Target("zerofx stage 3, budget", "FSDP2 + checkpoint", "time", 0.8),
    Target("zerofx stage 3, budget", "FSDP2 + checkpoint + compile", "time", 0.8),
    *(Target(f"zerofx stage {stage}", "DDP + compile", "time", 0.95) for stage in (0, 1, 2)),
    Target("zerofx, shared", "DTensor + compile", "time", 0.75),
    Target("zerofx, shared, 80 %", "DTensor + compile", "time", 0.75),
    Target("zerofx, shared, 80 %", "DTensor + compile", "peak", 0.8),
    Target("zerofx, two axes", "FSDP2 + DTensor + compile", "time", 0.75),
    Target("zerofx, two axes, 80 %", "FSDP2 + DTensor + compile", "time", 0.75),
    Target("zerofx, two axes, 80 %", "FSDP2 + DTensor + compile", "peak", 0.8),
    Target("zerofx", "torch.compile", "time", 0.95),
    Target("zerofx, 95 %", "torch.compile", "time", 0.95),
    Target("zerofx, 95 %", "torch.compile", "peak", 0.95),
)


@dataclass(frozen=True)
class Row:
    """One contender of one group. Ratios are to the group's baseline in the same run; sizes and FLOPs are one rank's.

    ``peak_share`` is the part of the FLOP/s that matrix products reached in the same run.
    """

    name: str
    median_seconds: float
    min_seconds: float
    ratio: float
    min_ratio: float
    cpu_ratio: float
    tokens_per_second: float
    peak_share: float
    peak_bytes: int
    resident_bytes: int | None
    wire_bytes: int | None
    ready_seconds: float
    ready_again_seconds: float | None
    num_steps: int
    predicted_peak_bytes: int | None


def rows(group: dict[str, Any]) -> list[Row]:
    """A row for each contender that ran, the baseline's once."""
    by_name: dict[str, Row] = {}
    for few in _chunks(group["contenders"]):
        ran = {contender["name"]: contender for contender in few if contender["rounds"]}
        baseline = next((contender for name, contender in ran.items() if name != MATMUL), None)
        for name, contender in ran.items():
            if name != MATMUL and name not in by_name and baseline is not None:
                by_name[name] = _row(contender, baseline, ran.get(MATMUL), group["num_ranks"])
    return list(by_name.values())


def _chunks(contenders: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for number in sorted({contender["chunk"] for contender in contenders}):
        yield [contender for contender in contenders if contender["chunk"] == number]


def _row(contender: dict[str, Any], baseline: dict[str, Any], matmul: dict[str, Any] | None, num_ranks: int) -> Row:
    facts, shape = contender["facts"], contender["facts"]["shape"]
    median, least, least_cpu = _seconds(contender)
    base_median, base_least, base_cpu = _seconds(baseline)
    peak_rate = matmul["facts"]["flops"] / _seconds(matmul)[1] if matmul is not None else float("nan")
    return Row(
        name=contender["name"],
        median_seconds=median,
        min_seconds=least,
        ratio=median / base_median,
        min_ratio=least / base_least,
        cpu_ratio=least_cpu / base_cpu,
        tokens_per_second=num_ranks / facts.get("ranks_per_batch", 1) * shape["sequences"] * shape["tokens"] / median,
        peak_share=facts["flops"] / median / peak_rate,
        peak_bytes=facts["peak_bytes"],
        resident_bytes=facts["resident_bytes"],
        wire_bytes=facts["wire_bytes"],
        ready_seconds=facts["ready_seconds"],
        ready_again_seconds=facts.get("ready_again_seconds"),
        num_steps=sum(map(len, contender["rounds"])),
        predicted_peak_bytes=facts.get("predicted_peak_bytes"),
    )


def _seconds(contender: dict[str, Any]) -> tuple[float, float, float]:
    """Median and least seconds of a step, and its least CPU seconds."""
    steps = [step for steps in contender["rounds"] for step in steps]
    walls = [wall for wall, _ in steps]
    return statistics.median(walls), min(walls), min(cpu for _, cpu in steps)


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured; ``ratio`` is of medians, or of peaks, ``min_ratio`` of least seconds."""

    target: Target
    ratio: float
    min_ratio: float | None

    @property
    def met(self) -> bool:
        return self.ratio <= self.target.at_most


def verdicts(listed: list[Row]) -> list[Verdict]:
    """The targets whose two sides were measured."""
    by_name = {row.name: row for row in listed}
    judged = []
    for target in TARGETS:
        ours, peer = by_name.get(target.ours), by_name.get(target.peer)
        if ours is None or peer is None:
            continue
        if target.measure == "peak":
            judged.append(Verdict(target, ours.peak_bytes / peer.peak_bytes, None))
        else:
            judged.append(Verdict(target, ours.ratio / peer.ratio, ours.min_ratio / peer.min_ratio))
    return judged


def markdown(data: dict[str, Any]) -> str:
    """All runs as tables, each with the targets it answers."""
    parts = []
    for key, run in data["runs"].items():
        machine = run["machine"]
        parts.append(f"## {key}\n\n{machine['name']}, {machine['cores']} cores, torch {machine['torch']}\n")
        for name, group in run["groups"].items():
            listed = rows(group)
            if not listed:
                continue
            parts.append(f"### {name}, {group['num_ranks']} rank(s)\n\n{table(listed)}\n")
            judged = verdicts(listed)
            if judged:
                parts.append(_verdict_table(judged) + "\n")
            parts += [
                f"- {contender['name']}: {reason(contender)}\n"
                for contender in group["contenders"]
                if reason(contender)
            ]
    return "\n".join(parts)


def reason(contender: dict[str, Any]) -> str:
    """Why a contender has no row, on one line."""
    text = contender["facts"].get("refused") or contender["facts"].get("failed") or ""
    return text.strip().splitlines()[-1] if text else ""


def table(listed: list[Row]) -> str:
    """A line for each row."""
    cells = [
        [
            row.name,
            f"{row.median_seconds:.3f}",
            f"{row.min_seconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.min_ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{100 * row.peak_share:.0f} %",
            f"{row.peak_bytes / 1e6:.1f}",
            _megabytes(row.predicted_peak_bytes),
            _megabytes(row.resident_bytes),
            _megabytes(row.wire_bytes),
            f"{row.ready_seconds:.0f}" + (f", then {again:.0f}" if (again := row.ready_again_seconds) else ""),
            str(row.num_steps),
        ]
        for row in listed
    ]
    headers = ["", "median s", "min s", "ratio", "of minima", "of CPU s", "tokens/s", "of matmul peak", "peak MB",
               "predicted MB", "resident MB", "sent MB", "ready s", "steps"]  # fmt: skip
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"


def _verdict_table(judged: list[Verdict]) -> str:
    cells = [
        [
            f"{verdict.target.ours} / {verdict.target.peer}",
            verdict.target.measure,
            f"{verdict.ratio:.3f}",
            "" if verdict.min_ratio is None else f"{verdict.min_ratio:.3f}",
            f"{verdict.target.at_most:.2f}",
            "yes" if verdict.met else "no",
        ]
        for verdict in judged
    ]
    headers = ["ratio", "of", "measured", "of minima", "at most", "met"]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def plot(data: dict[str, Any], path: Path) -> None:
    """Peak memory against step time: a panel for each run and group."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [
        (f"{key}: {name}", listed)
        for key, run in data["runs"].items()
        for name, group in sorted(run["groups"].items())
        if (listed := rows(group))
    ]
    if not panels:
        return
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=(5.5 * num_columns, 4 * num_rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, listed) in zip(grid.flat, panels, strict=False):
        slowest, highest = max(row.median_seconds for row in listed), max(row.peak_bytes for row in listed) / 1e6
        lowest_free = 0.0
        for row in sorted(listed, key=lambda row: row.peak_bytes):
            color = "tab:red" if row.name.startswith("zerofx") else "tab:gray"
            at = row.median_seconds, row.peak_bytes / 1e6
            # Names stand in a column, none over another, each with a line to its point.
            label_at = 1.1 * slowest, max(at[1], lowest_free)
            lowest_free = label_at[1] + 0.06 * highest
            axes.scatter(*at, color=color, zorder=3)
            axes.plot(*zip(at, label_at, strict=True), color=color, linewidth=0.5, alpha=0.6)
            axes.annotate(
                row.name, label_at, (3, 0), textcoords="offset points", fontsize=7, color=color, va="center",
                annotation_clip=False,
            )  # fmt: skip
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step, s (median): to the left is faster")
        axes.set_ylabel("peak, MB per rank: below is less")
        axes.set_xlim(0, 1.1 * slowest)
        axes.set_ylim(0, max(1.1 * highest, lowest_free))
        axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
