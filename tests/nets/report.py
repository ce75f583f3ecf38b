"""``python -m tests.nets.report`` writes docs/coverage.md from the records of the nets."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tests.lib.checkout import ROOT
from tests.nets.records import Record, read_records, results_path

PAGE = ROOT / "docs" / "coverage.md"
_COLUMNS = 120
_REASON_COLUMNS = 90
_NAMES_COLUMNS = 40
PUBLIC_REPORTS = ROOT / "tests" / "nets" / "public_reports.md"  # tried by hand

NETS = {
    "operators": (
        "Every differentiable entry of torch's own operator database (`OpInfo`) that a CPU runs, in float32 and in "
        "bfloat16, as a model of that one operator whose inputs are parameters: the bits of eager PyTorch after "
        "several steps at stage 3, and the predicted peak equal to the measured one."
    ),
    "optimizers": (
        "Every optimizer of `torch.optim` and of `pytorch_optimizer`, with and without weight decay, with a "
        "learning-rate scheduler and two parameter groups, on one and on two ranks at stage 3 and on three at stages 0 "
        "and 3, from a state of the plain optimizer, and resumed from a checkpoint of one rank more: the bits of its "
        "own `step()`."
    ),
    "models": (
        "Models and training scripts of other people's libraries, at stages 0 and 3, on one and on two ranks, under "
        "the least possible budget, and with values on the host: the bits of eager PyTorch, the budget kept to the "
        "byte. In tiles, which take the least of all and sum in parts, they are the same up to rounding."
    ),
    "faults": (
        "Ranks that freeze, die or are interrupted at every kind of wait: an error of zerofx's that names the rank, in "
        "time, on every other rank, after which close() and the end of the process take no more than a moment."
    ),
    "staleness": (
        "Scripts that change what a step computes between two steps, at twelve steps of which nine change something: "
        "globals, closures, attributes, items, hooks, methods, settings, what libraries keep. On the eager backend the "
        "bits of eager PyTorch, on the default backend the same up to rounding. A step that computes with what was is "
        "wrong, and called stale; of what is exact the record says how often it was captured."
    ),
    "saves": (
        "Ranks that are killed while they save asynchronously, next to a full drive, files that are removed or a "
        "second run in the folder: nobody hangs, the latest checkpoint is whole, and the next save removes what was "
        "left."
    ),
    "crafted": (
        "Checkpoints whose markers, headers and files were changed, with hashes that are right: refused before "
        "anything is changed, or loaded to the same bits."
    ),
    "mutations": (
        "Plan and cache files of which bytes, values or types were changed: refused as what they are, taken for "
        "absent, or harmless."
    ),
    "inductor": (
        "Random graphs of three to eight operators with their scalar arguments, trained on the default backend: what "
        "eager PyTorch gives, up to rounding, run as Inductor has rewritten them, and in part compiled; its bits on "
        "the eager backend."
    ),
}

_HEAD = """\
# Coverage

Nets are cast over code that nobody here wrote. Each case has one of three outcomes:

- **exact**: all that the net promises holds, to the bit and to the byte.
- **refused**: zerofx said in an error of its own, before anything was changed, that it does not do this.
- **wrong**: anything else: other bits, another peak, an exception that is not zerofx's own, a crash, a hang.

A part of each net that a seed picks runs in CI; `python -m tests.nets.<net>` runs the whole of it and writes
`benchmarks/results/coverage_<net>.json`, with each case and its reason in full; `python -m tests.nets.report` writes
this page from them.
"""


def page(records: Mapping[str, Sequence[Record]]) -> str:
    """The page in Markdown for the records of each net; a net without records has not been run."""
    lines = [_HEAD, "| net | cases | exact | refused | wrong |", "|---|---:|---:|---:|---:|"]
    lines += [_row(net, records.get(net, ())) for net in NETS]
    for net, text in NETS.items():
        lines += ["", f"## {net.capitalize()}", "", *textwrap.wrap(text, _COLUMNS, break_long_words=False)]
        of_net = records.get(net, ())
        if of_net:
            lines += _by_variant(of_net)
            lines += _by_detail(of_net, "wrong")
            lines += _by_detail(of_net, "refused")
    return "\n".join([*lines, "", PUBLIC_REPORTS.read_text(encoding="utf-8")])


def _row(label: str, records: Sequence[Record]) -> str:
    if not records:
        return f"| {label} | not run | | | |"
    counts = Counter(record.outcome for record in records)
    return f"| {label} | {len(records)} | {counts['exact']} | {counts['refused']} | {counts['wrong']} |"


def _by_variant(records: Sequence[Record]) -> list[str]:
    """A table with a row a variant; no table where there is one variant only."""
    variants = list(dict.fromkeys(record.variant for record in records))
    if len(variants) < 2:
        return []
    rows = [_row(variant, [record for record in records if record.variant == variant]) for variant in variants]
    return ["", "| variant | cases | exact | refused | wrong |", "|---|---:|---:|---:|---:|", *rows]


def _by_detail(records: Sequence[Record], outcome: str) -> list[str]:
    """Records of an outcome, those of one reason together, the most frequent reason first."""
    names: dict[str, list[str]] = {}
    for record in records:
        if record.outcome == outcome:
            names.setdefault(record.detail, []).append(record.name)
    if not names:
        return []
    lines = ["", f"### {outcome.capitalize()}", "", "| cases | reason | which |", "|---:|---|---|"]
    for detail, of_reason in sorted(names.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {len(of_reason)} | {_cell(detail)} | {_first_names(list(dict.fromkeys(of_reason)))} |")
    return lines


def _cell(text: str) -> str:
    return textwrap.shorten(" ".join(text.split()), _REASON_COLUMNS, placeholder=" ...").replace("|", "\\|")


def _first_names(names: Sequence[str]) -> str:
    """As many names as a cell has room for, at least one, and the number of the others."""
    lengths = accumulate(len(name) + 4 for name in names)
    num_shown = max(1, sum(length <= _NAMES_COLUMNS for length in lengths))
    shown = ", ".join(f"`{name}`" for name in names[:num_shown])
    return shown if num_shown == len(names) else f"{shown} and {len(names) - num_shown} more"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page({net: read_records(results_path(net)) for net in NETS}))


if __name__ == "__main__":
    main()
