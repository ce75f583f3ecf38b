"""What repeats is folded, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerofx.scheduler.plan.text.fold import Block, fold, span


def blocks(shapes: str, anchors: str = "abcdefghijklmnopqrstuvwxyz") -> list[tuple[str, int]]:
    """What repeats, and how often; lower-case letters are anchors."""
    found = fold(shapes, [shape in anchors for shape in shapes])
    return [(shapes[block.start : block.start + block.length], block.count) for block in found]


def test_layers_between_edges() -> None:
    assert blocks("Eabcabcabcd") == [("E", 1), ("abc", 3), ("d", 1)]


def test_the_repetition_that_covers_most_wins() -> None:
    assert blocks("aabaabaab") == [("aab", 3)]


def test_a_pair_of_events_does_not_hide_a_layer() -> None:
    # Two gathers in a row, as a prefetch leaves them: the layer begins with the second.
    assert blocks("GGWrXGWrXGWrX") == [("G", 1), ("GWrX", 3)]


def test_a_long_run_of_one_event_is_folded() -> None:
    assert blocks("aWWWWb") == [("a", 1), ("W", 4), ("b", 1)]


def test_a_run_of_several_events_is_not() -> None:
    assert blocks("XYXYXY") == [(one, 1) for one in "XYXYXY"]


@given(st.text("abXY", max_size=40))
def test_blocks_cover_all_items_in_order(shapes: str) -> None:
    found = fold(shapes, [shape in "ab" for shape in shapes])
    covered = [i for block in found for number in range(block.count) for i in block.repetition(number)]
    assert covered == list(range(len(shapes)))
    for block in found:
        first = [shapes[i] for i in block.repetition(0)]
        assert all([shapes[i] for i in block.repetition(n)] == first for n in range(block.count))


def test_repetition() -> None:
    assert [list(Block(3, 2, 2).repetition(n)) for n in range(2)] == [[3, 4], [5, 6]]


def test_span() -> None:
    assert span(["h.0"]) == "h.0"
    assert span(["h.3", "h.2", "h.1"]) == "h.3 … h.1"
