"""Crafted checkpoints are refused before anything is changed, or harmless: a part here, all of them nightly."""

from __future__ import annotations

import pytest

from tests.nets.crafted import NUM_CASES, run


@pytest.mark.parametrize("numbers", [range(24), pytest.param(range(NUM_CASES), marks=pytest.mark.slow)], ids=len)
def test_a_crafted_checkpoint_changes_nothing_or_has_the_bits(numbers: range) -> None:
    records = run(numbers)
    assert [record for record in records if record.outcome == "wrong"] == []
    assert {record.outcome for record in records} == {"exact", "refused"}
