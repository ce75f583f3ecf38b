"""Nothing that a script changes between steps goes stale: the part of the staleness net that takes little time."""

from __future__ import annotations

import pytest
import torch

from tests.nets.cases.staleness import staleness_cases
from tests.nets.cases.staleness.script import CHANGED, Case
from tests.nets.comparing import COMPARES, num_calls
from tests.nets.staleness import MOST_CAPTURES, apart, farthest, full_name, judge, missing

# Each captures what it changes.
pytestmark = pytest.mark.captures

CASES = [
    pytest.param(case, id=full_name(case), marks=[pytest.mark.slow] if case.slow else [])
    for case in staleness_cases()
    if not missing(case)
]


@pytest.mark.parametrize("case", CASES)
def test_a_step_computes_what_eager_mode_would(case: Case) -> None:
    found = judge(case, "eager")
    assert found.judged in ("exact", "refused"), found.detail
    assert case.kind != "number" or found.captures <= MOST_CAPTURES, found.detail


@pytest.mark.filterwarnings("ignore")  # of hooks and of what scripts do to modules
@pytest.mark.parametrize("case", [one for one in CASES if one.values[0].tells])  # type: ignore[union-attr]  # a case
def test_a_stale_value_would_be_seen(case: Case) -> None:
    whole = case.train(None, len(CHANGED))
    for most in range(3):
        part, step = case.train(None, most), CHANGED[most]
        assert all(map(torch.equal, whole.losses[: step - 1], part.losses[: step - 1]))
        distance = apart(whole.losses[step - 1], part.losses[step - 1])
        if len(whole.states) > 1:  # of each step
            distance = max(distance, farthest(whole.states[step], part.states[step])[1])
        assert distance > 2e-4


def test_comparing_calls_nothing_in_python_for_each_module() -> None:
    calls = num_calls(2)
    assert len(calls) == len(COMPARES)
    assert num_calls(20) == calls
