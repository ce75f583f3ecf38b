"""Mutated files are refused, or absent, or harmless: a seeded part here, all of them in the nightly part."""

from __future__ import annotations

import pytest

from tests.nets.mutations import KINDS, NUM_CASES, run


@pytest.mark.parametrize("numbers", [range(2 * len(KINDS)), pytest.param(range(NUM_CASES), marks=pytest.mark.slow)])
def test_no_mutation_is_an_error_of_another_kind(numbers: range) -> None:
    found = run(numbers)
    assert [one for one in found if one.outcome == "wrong"] == []
    assert {one.outcome for one in found} == {"exact", "refused"}
