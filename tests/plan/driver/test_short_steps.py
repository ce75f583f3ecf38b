"""What a few layers say of all of them within a budget: arithmetic alone."""

from __future__ import annotations

import pytest

from zerofx.driver.meshes.short_steps import Savings, StepTotals

KEEPING = StepTotals(peak_bytes=100.0, step_seconds=10.0, exposed_seconds=1.0, within=5.0, across=3.0, computing=8.0)
LEAST = StepTotals(peak_bytes=60.0, step_seconds=14.0, exposed_seconds=1.0, within=9.0, across=3.0, computing=12.0)


def test_as_many_layers_give_up_as_it_takes() -> None:
    given_up = Savings(KEEPING, LEAST, is_refused=False)
    assert given_up.seconds_per_byte == pytest.approx(0.1)
    assert given_up.apply(KEEPING, 80) == StepTotals(80.0, 12.0, 1.0, 7.0, 3.0, 10.0)
    assert given_up.apply(KEEPING, 120) == KEEPING


def test_a_little_more_is_given_up_at_the_same_price_and_no_more_than_there_is() -> None:
    given_up, refused = Savings(KEEPING, LEAST, is_refused=False), Savings(KEEPING, LEAST, is_refused=True)
    assert given_up.reaches(KEEPING, 57) and not given_up.reaches(KEEPING, 50) and not refused.reaches(KEEPING, 80)
    assert given_up.apply(KEEPING, 56).peak_bytes == pytest.approx(56)
    assert given_up.apply(KEEPING, 50).peak_bytes == pytest.approx(56) and refused.apply(KEEPING, 50) == LEAST


def test_what_frees_nothing_costs_nothing() -> None:
    assert Savings(KEEPING, KEEPING, is_refused=True).seconds_per_byte == 0.0
    assert Savings(KEEPING, KEEPING, is_refused=True).apply(KEEPING, 50) == KEEPING
