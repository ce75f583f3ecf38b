"""The net over operators: a part, another from day to day, and the whole (slow). No case is worse than its record."""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import PART
from tests.nets.records import Record, read_records, results_path

pytest.importorskip("expecttest", reason="torch's database of operators imports it")

from tests.nets.cases.operators import OperatorCase, operator_cases
from tests.nets.operators import run

_NUM_SAMPLED = 5


def _good_cases() -> list[OperatorCase]:
    """Those that are exact or refused by their records."""
    outcomes = {(record.name, record.variant): record.outcome for record in read_records(results_path("operators"))}
    return [case for case in operator_cases() if outcomes.get((case.name, case.dtype)) in ("exact", "refused")]


def _wrong(cases: list[OperatorCase]) -> list[Record]:
    return [record for record in run(cases) if record.outcome == "wrong"]


def test_a_sample_of_operators_trains_like_eager_mode_or_is_refused() -> None:
    assert _wrong(random.Random(os.environ[PART]).sample(_good_cases(), _NUM_SAMPLED)) == []


@pytest.mark.slow
def test_all_operators_train_like_eager_mode_or_are_refused() -> None:
    assert _wrong(_good_cases()) == []


def test_records_are_those_of_the_cases() -> None:
    names = {(case.name, case.dtype) for case in operator_cases()}
    assert {(record.name, record.variant) for record in read_records(results_path("operators"))} <= names
