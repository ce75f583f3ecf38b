"""The page: one well-formed file that needs nothing else, small whatever the schedule."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch._ops import OpOverload

import zerofx
from tests.lib.graphs import sgd
from tests.lib.lowered import lowered
from tests.lib.models import CASES, batches
from zerofx.ir import ops
from zerofx.json_format import from_data
from zerofx.report.page import ABOUT_INSTRUCTIONS, CATEGORIES
from zerofx.report.schedule import Schedule, make_schedule
from zerofx.report.table import schedule_lines
from zerofx.scheduler.cost.categories import Category
from zerofx.units import format_bytes, format_seconds

_EMPTY = {"meta", "link", "img", "br"}  # elements that have no end


def page(schedule: Schedule, folder: Path, **options: Any) -> str:
    path = folder / "page.html"
    schedule.to_html(path, **options)
    return path.read_text(encoding="utf-8")


class _Balance(HTMLParser):
    """Follows which elements are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        while self.open.pop() != tag:
            assert self.open[-1:] != [], f"</{tag}> closes nothing"


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (1, 2), (3, 8)])
def test_well_formed_and_self_contained(tmp_path: Path, stage: int, num_ranks: int) -> None:
    text = page(make_schedule(lowered(stage=stage, num_ranks=num_ranks)), tmp_path)
    balance = _Balance()
    balance.feed(text)
    assert balance.open == []
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert [ElementTree.fromstring(picture).get("id") for picture in pictures] == ["memory"]
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=|@import|url\(", text)
    assert not re.search(r"nan|inf\b", "".join(re.findall(r'="([^"]*)"', "".join(pictures))))


def test_it_has_the_numbers_the_table_and_the_layers(tmp_path: Path) -> None:
    schedule = make_schedule(lowered(8))
    text, totals = page(schedule, tmp_path, title="a <step>"), schedule.totals
    assert "<title>a &lt;step&gt;</title>" in text
    for number in (
        format_bytes(totals.peak_bytes),
        format_seconds(totals.step_seconds),
        format_seconds(totals.exposed_seconds),
        format_bytes(totals.wire_bytes),
    ):
        assert f"<b>{number}</b>" in text
    for cells in schedule_lines(schedule.instructions, fold_layers=True):
        assert all(escape(cell.strip()) in text for cell in cells)


def test_limits_are_drawn_when_near_and_always_told(tmp_path: Path) -> None:
    schedule = make_schedule(lowered())
    peak = schedule.totals.peak_bytes
    text = page(schedule, tmp_path, limits={"budget": peak // 2, "device": peak * 100}, notes="because")
    assert text.count('class="limit"/>') == 1 and text.count('class="peak"/>') == 1
    assert f"The peak is {format_bytes(peak - peak // 2)} ABOVE the budget" in text
    assert f"The peak is {format_bytes(peak * 99)} below the device" in text
    assert "<pre>because</pre>" in text


def test_slower_tiers_have_a_picture_each_and_survive_json(tmp_path: Path) -> None:
    step = lowered(tiers=("host", "nvme"))
    schedule = make_schedule(step)
    text = page(schedule, tmp_path)
    for tier, use in step.simulation.live.slower.items():
        sizes = [size for _, size in schedule.slower_memory[tier]]
        assert max(sizes) == use.peak_bytes and sizes[0] == use.persistent_bytes
        assert f"<b>{format_bytes(use.peak_bytes)}</b><small>peak on {tier}</small>" in text
    data = json.loads(schedule.to_json())
    del data["format"]
    again = from_data(Schedule, data)
    assert again == schedule
    assert page(again, tmp_path) == text


def test_only_what_the_step_uses_is_explained(tmp_path: Path) -> None:
    alone = page(make_schedule(lowered(stage=0, num_ranks=1)), tmp_path)
    together = page(make_schedule(lowered(stage=3, num_ranks=2, tiers=("nvme",))), tmp_path)
    for word in ("<td>all_gather</td>", "<td>offload</td>", "<td>nvme_write</td>", "<td>collective</td>"):
        assert word in together and word not in alone


def test_every_event_that_has_a_line_is_explained() -> None:
    operators = [op for op in ops.EVENTS if isinstance(op, OpOverload)]
    assert set(ABOUT_INSTRUCTIONS) == {op.overloadpacket.__name__ for op in operators}
    assert set(ops.EVENTS) - set(operators) == {ops.hyperparameters}


def test_every_category_has_a_colour() -> None:
    assert set(CATEGORIES) == set(Category)


def test_a_big_schedule_makes_a_small_page(tmp_path: Path) -> None:
    """The schedule of many steps, one after the other: the picture does not grow, and the highest point is kept."""
    one = make_schedule(lowered(6))
    seconds, copies = one.totals.step_seconds, 300
    instructions = tuple(
        replace(row, start_seconds=row.start_seconds + number * seconds)
        for number in range(copies)
        for row in one.instructions
    )
    memory = [(at + number * seconds, held) for number in range(copies) for at, held in one.memory]
    memory[len(memory) // 2] = (memory[len(memory) // 2][0], {"activations": 77 * 2**40})
    many = Schedule((), instructions, replace(one.totals, step_seconds=copies * seconds), tuple(memory))
    assert len(many.instructions) > 10_000
    text = page(replace(many, instructions=one.instructions), tmp_path)
    assert len(text) < 400_000
    assert "77.0 TiB" in text


def test_a_step_that_takes_no_time_has_a_page(tmp_path: Path) -> None:
    schedule = make_schedule(lowered(1))
    nothing = replace(schedule.totals, step_seconds=0.0, peak_bytes=0)
    assert "Memory" in page(Schedule((), (), nothing, ()), tmp_path)


@pytest.mark.parametrize("fused", [False, True])
def test_the_curve_reaches_the_peak_and_no_further(tmp_path: Path, fused: bool) -> None:
    schedule = make_schedule(lowered(stage=0, num_ranks=1, fused=fused))
    peak = schedule.totals.peak_bytes
    assert max(sum(held.values()) for _, held in schedule.memory) == peak
    assert f"At the peak, {format_bytes(peak)} in all" in page(schedule, tmp_path)


def test_what_was_decided_comes_first_and_the_schedule_last(tmp_path: Path) -> None:
    schedule = make_schedule(lowered())
    text = page(schedule, tmp_path, notes="all of it")
    headings = re.findall(r"<h2>([^<]+)</h2>", text)
    assert headings == ["What was decided", "The peak", "Memory", "Streams", "Schedule"]
    for kind, about, reason in schedule.decisions:
        assert kind in text and escape(about) in text and escape(reason) in text
    assert "position: sticky" in text and "<th>peak</th>" in text


def test_streams_have_the_seconds_that_they_are_busy(tmp_path: Path) -> None:
    schedule = make_schedule(lowered(num_ranks=8))
    text = page(schedule, tmp_path)
    for stream in {row.stream for row in schedule.instructions}:
        busy = sum(row.seconds for row in schedule.instructions if row.stream == stream)
        assert f'<td>{stream}</td><td class="number">{format_seconds(busy)}</td>' in text


def test_values_that_are_computed_again_have_their_seconds() -> None:
    case = CASES["gpt"]
    model, (args, _) = case.model(), next(batches(case, 0, 1))
    schedule = zerofx.plan(model, sgd(model), args, world_size=1, machine="cpu", recompute="full").schedule()
    again = sum(row.recompute_seconds for row in schedule.rows)
    assert again > 0 and again == pytest.approx(sum(row.recompute_seconds for row in schedule.instructions))
