"""What came of all cases, in few lines: what whoever has ten minutes sees last."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks import one_gpu
from benchmarks.gpu.case import Entry
from benchmarks.peers import report as peers_report

MOST_LINES = 40
_MOST_CHARACTERS = 150


def summary(entries: Collection[Entry], seconds: float) -> str:
    """At most 40 lines: a line for each case that ran or failed, in order, and one for all that did not run."""
    shown = [entry for entry in entries if entry.status in ("ran", "failed") or entry.results]
    others = [entry for entry in entries if entry not in shown]
    lines = [f"{_mark(entry)} {entry.name}: {_words(entry)}" for entry in shown]
    if len(lines) > MOST_LINES - 3:
        lines = [*lines[: MOST_LINES - 4], f"... and {len(lines) - MOST_LINES + 4} more"]
    for status in ("lacking", "not run"):
        listed = [f"{entry.name} ({entry.why})" for entry in others if entry.status == status]
        lines += [f"{status}: {', '.join(listed)}"] if listed else []
    counts = ", ".join(f"{number} {status}" for status, number in Counter(e.status for e in entries).items())
    return "\n".join(line[:_MOST_CHARACTERS] for line in (*lines, f"{counts}; {seconds:.0f} s"))


def _mark(entry: Entry) -> str:
    """How a case came by its numbers: its seconds, the compiler's cache, and if it had the device alone."""
    alone = {True: "alone", False: "shared", None: ""}[entry.alone]
    return f"{entry.seconds:4.0f} s {entry.cache:4} {alone:6}"


def _words(entry: Entry) -> str:
    why = f"{entry.status}: {entry.why.splitlines()[0][:80]}" if entry.why else ""
    return "; ".join(text for text in (why, _numbers(entry.results)) if text) or entry.status


def _numbers(result: Mapping[str, Any]) -> str:
    """The few numbers that stand for a case."""
    if "outcomes" in result:
        counts = Counter(outcome["outcome"] for outcome in result["outcomes"].values())
        left = len(result["collected"]) - len(result["outcomes"])
        return ", ".join(
            [*(f"{number} {name}" for name, number in counts.items()), *([f"{left} left"] if left else [])]
        )
    if "one_gpu" in result:
        listed = [row for group in result["one_gpu"]["groups"].values() for row in peers_report.rows(group)]
        verdicts = one_gpu.verdicts(
            {name: peers_report.rows(g) for name, g in result["one_gpu"]["groups"].items()}, on_cpu=False
        )
        ratios = ", ".join(
            f"{v.what.removeprefix('time: ')} {v.measured:.2f}" for v in verdicts if v.what.startswith("time")
        )
        return ratios or ", ".join(f"{row.name} {row.median_seconds:.3f} s" for row in listed)
    if "torch_losses" in result and "losses" in result:
        return f"last losses {result['losses'][-1]:.4f}, torch's {result['torch_losses'][-1]:.4f}"
    if "refused" in result:
        return f"refused: {result['refused'].splitlines()[0]}"
    if "predicted_seconds" in result and result.get("seconds"):
        median, predicted = statistics.median(result["seconds"]), result["predicted_seconds"]
        peak = result["predicted_bytes"]["device"]
        reserved = (
            f", reserved {100 * (result['reserved_bytes'] / peak - 1):+.1f} %" if "reserved_bytes" in result else ""
        )
        return f"{median:.3f} s, predicted {predicted:.3f}{reserved}"
    if "host_rates" in result:
        return "; ".join(f"{what} up to {max(r.values()) / 1e9:.0f} GB/s" for what, r in result["host_rates"].items())
    rows = [row for name, data in result.items() if name.startswith("kernels") for row in data["rows"]]
    return ", ".join(f"{row['contender']} {1e3 * row['median_seconds']:.2f} ms" for row in rows)
