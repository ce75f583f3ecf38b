"""Scripts that read tensors for their logs log what they do in eager mode, or are refused: none logs anything wrong."""

from __future__ import annotations

import pytest

from tests.nets.cases.logs import Way, log_ways
from tests.nets.logs import judge, run

# Scripts leave their files open until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.sweep(15)
@pytest.mark.captures
@pytest.mark.parametrize("way", log_ways(), ids=lambda way: way.name)
def test_a_way_to_log_is_exact_or_refused(way: Way) -> None:
    judged = judge(way)
    assert judged.outcome == ("refused" if way.refused else "exact"), judged.detail


@pytest.mark.slow
@pytest.mark.captures
def test_two_ranks_log_the_same_as_in_eager_mode() -> None:
    ways = log_ways()
    judged = zip(ways, run(ways, 2), strict=True)
    assert {
        way.name: each.detail for way, each in judged if each.outcome != ("refused" if way.refused else "exact")
    } == {}
