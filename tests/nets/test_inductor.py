"""Random graphs, others each day: as Inductor rewrites them, on the eager backend, compiled; all of them nightly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.lib import compiling
from tests.nets.inductor import COMPILED, EAGER, NUM_CASES, REWRITTEN, Batch, batches, check, run
from tests.nets.records import Record
from zerofx.codegen.inductor import decompositions

pytestmark = compiling.trainings

_ALL = batches(range(NUM_CASES))
# Of graphs that are trained together most of the time is that of each.
_HALVES = [Batch(each.variant, half) for each in _ALL for half in (each.cases[::2], each.cases[1::2]) if half]
_SCALED = 34  # a graph with a product that is scaled as it is added


def _wrong(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.outcome == "wrong"]


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "batch", [batch for batch in _HALVES if batch.variant == REWRITTEN], ids=lambda batch: batch.cases[0].name
)
def test_graphs_are_rewritten_to_what_they_are(batch: Batch) -> None:
    assert _wrong(check(batch)) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "batch", [batch for batch in _HALVES if batch.variant == EAGER], ids=lambda batch: batch.cases[0].name
)
def test_graphs_on_the_eager_backend_have_eager_modes_bits(batch: Batch) -> None:
    assert _wrong(check(batch)) == []


def test_a_compiled_graph_gives_what_eager_mode_gives() -> None:
    assert _wrong(check(Batch(COMPILED, batches([_SCALED])[0].cases))) == []


def test_a_scalar_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompositions, "MENDS", {})
    assert [record.outcome for record in check(Batch(REWRITTEN, batches([_SCALED])[0].cases))] == ["wrong"]


@pytest.mark.slow
def test_compiled_graphs_give_what_eager_mode_gives() -> None:
    assert _wrong(list(run([batch for batch in _ALL if batch.variant == COMPILED]))) == []
