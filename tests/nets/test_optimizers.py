"""The net over optimizers: a part, another from day to day, and the whole (slow). No case is wrong."""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import PART

pytest.importorskip("pytorch_optimizer", reason="the net is over its optimizers too")

from tests.nets.cases.optimizers import OptimizerCase, optimizer_cases
from tests.nets.optimizers import difference, run
from tests.nets.records import read_records, results_path

_NUM_SAMPLED = 8
_NUM_SAMPLED_ON_TWO_RANKS = 4


def _cases(num_ranks: int) -> list[OptimizerCase]:
    return [case for case in optimizer_cases() if case.num_ranks == num_ranks]


def test_a_sample_of_optimizers_trains_like_eager_mode_or_is_refused() -> None:
    chosen = random.Random(os.environ[PART])
    cases = chosen.sample(_cases(1), _NUM_SAMPLED) + chosen.sample(_cases(2), _NUM_SAMPLED_ON_TWO_RANKS)
    records = list(run(cases))
    assert [record for record in records if record.outcome == "wrong"] == []
    assert "exact" in {record.outcome for record in records}


@pytest.mark.slow
def test_all_optimizers_train_like_eager_mode_or_are_refused() -> None:
    assert [record for record in run(optimizer_cases()) if record.outcome == "wrong"] == []


def test_records_are_those_of_the_cases() -> None:
    names = {(case.name, case.full_variant) for case in optimizer_cases()}
    records = read_records(results_path("optimizers"))
    assert {(record.name, record.variant) for record in records} <= names
    assert not [record for record in records if record.outcome == "wrong"]


def test_differences_are_named_by_their_place() -> None:
    assert difference({"a": [1, float("nan")]}, {"a": [1, float("nan")]}) == ""
    assert difference({"a": [1, 2]}, {"a": [1, 3]}, "x") == "x[a][1]: 2 expected, 3 found"
    assert difference({"a": 1}, {"a": 1.0}) == "[a]: int expected, float found"
    assert difference({"a": 1}, {}) == ": {'a'} on one side"
