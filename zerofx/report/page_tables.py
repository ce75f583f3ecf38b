"""The tables and bars of a schedule's page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from zerofx.report.peak import PeakTensor
from zerofx.report.pictures import COLOURS, colour_of
from zerofx.report.rows import ScheduleRow
from zerofx.report.table import HEADERS, INDENT, schedule_lines
from zerofx.units import format_bytes

_MOST_BARS = 24  # layers with a bar of their own, the largest; the others share one
_FIRST_NUMBER = 5  # column of the schedule: names stand before it


def decisions_table(decisions: Sequence[tuple[str, str, str]]) -> str:
    """A row for each kind of decision, with its subject and reason."""
    if not decisions:
        return "<p>Nothing had to be: parameters, states and activations stay on the device.</p>"
    rows: list[list[str]] = []
    previous = ""
    for kind, about, reason in decisions:
        rows.append([f"<td>{escape(kind if kind != previous else '')}</td>", _cell(about), _cell(reason)])
        previous = kind
    return f'<div class="wide" id="decided">{_table(("what", "of", "decision and reason"), rows)}</div>'


def peak_table(tensors: Sequence[PeakTensor], peak_bytes: int) -> str:
    """A row for each of the largest tensors at the peak."""
    rows = [
        [
            _number(format_bytes(tensor.num_bytes)),
            _number(f"{tensor.num_bytes / peak_bytes:.0%}" if peak_bytes else ""),
            f'<td class="kind"><span class="swatch" style="background:{colour_of(tensor.category)}"></span>'
            f"{escape(tensor.category)}</td>",
            _cell(tensor.what + (f"  x{tensor.count}" if tensor.count > 1 else "")),
            _cell(tensor.layer),
            f'<td class="code">{escape(tensor.line)}</td>',
            _cell(tensor.fate),
        ]
        for tensor in tensors
    ]
    headers = ("bytes", "share", "kind", "tensor", "layer", "line", "why it is there")
    return f'<div class="wide">{_table(headers, rows)}</div>'


def layer_bars(layers: Mapping[str, Mapping[str, int]]) -> str:
    """A bar for each layer with its bytes at the peak by category; the smallest of many layers share one."""
    totals = {layer: sum(sizes.values()) for layer, sizes in layers.items()}
    own = set(sorted(totals, key=lambda layer: -totals[layer])[:_MOST_BARS])
    bars = {layer: dict(layers[layer]) for layer in layers if layer in own}
    rest = [layer for layer in layers if layer not in own]
    if rest:
        together = bars.setdefault(f"{len(rest)} others", {})
        for layer in rest:
            for category, size in layers[layer].items():
                together[category] = together.get(category, 0) + size
    widest = max((sum(sizes.values()) for sizes in bars.values()), default=0) or 1
    order = [str(category) for category in COLOURS]
    lines = []
    for layer, sizes in bars.items():
        parts = "".join(
            f'<i style="width:{100 * sizes[name] / widest:.2f}%;background:{colour_of(name)}" '
            f'title="{escape(name)}: {format_bytes(sizes[name])}"></i>'
            for name in sorted(sizes, key=order.index)
        )
        total = format_bytes(sum(sizes.values()))
        lines.append(f'<span>{escape(layer)}</span><div class="bar">{parts}</div><span class="number">{total}</span>')
    return f'<div id="layers">{"".join(lines)}</div>'


def schedule_html(instructions: Sequence[ScheduleRow]) -> str:
    """The schedule as a table whose header stays in view; repeated layers are shown once, as in its text."""
    rows, kinds = [], []
    for cells in schedule_lines(instructions, fold_layers=True):
        inner = cells[1].startswith(INDENT)
        kinds.append("inner" if inner else "folded" if "  x" in cells[1] else "")
        rows.append([_cell(cell.strip()) if 1 <= i < _FIRST_NUMBER else _number(cell) for i, cell in enumerate(cells)])
    return f'<div id="schedule">{_table(HEADERS, rows, kinds)}</div>'


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], kinds: Iterable[str] | None = None) -> str:
    """``rows`` are lists of whole cells; ``kinds`` are their classes."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    classes = [f' class="{kind}"' if kind else "" for kind in kinds] if kinds is not None else [""] * len(rows)
    body = "".join(f"<tr{name}>{''.join(row)}</tr>" for name, row in zip(classes, rows, strict=True))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'
