"""Nothing that a script changes between steps goes stale: the part of the staleness net that takes little time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.nets.cases.staleness import staleness_cases
from tests.nets.cases.staleness.script import CHANGED, Case
from tests.nets.comparing import COMPARES, num_calls
from tests.nets.staleness import MOST_CAPTURES, apart, farthest, full_name, judge, missing
from zerofx.capture.python_state.columns import Tables
from zerofx.session.guards import ModeWatch, ParameterWatch

# Each captures what it changes.
pytestmark = pytest.mark.captures

CASES = [
    pytest.param(case, id=full_name(case), marks=[pytest.mark.slow] if case.slow else [])
    for case in staleness_cases()
    if not missing(case)
]


@pytest.mark.days(3)
@pytest.mark.sweep(14)
@pytest.mark.parametrize("case", CASES)
def test_a_step_computes_what_eager_mode_would(case: Case) -> None:
    found = judge(case, "eager")
    assert found.judged in ("exact", "refused"), found.detail
    assert case.kind != "number" or found.captures <= MOST_CAPTURES, found.detail


@pytest.mark.sweep(40)
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


WRITES: dict[str, Callable[[Any], object]] = {
    "an item": lambda table: table.update(a=2),
    "another item": lambda table: table.__setitem__("c", 1),
    "no item": lambda table: table.__delitem__("a"),
    "items that are moved to another": lambda table: table.setdefault("d", table.pop("a")),
    "none": lambda table: table.clear(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_tables_that_were_written_to_are_given_once(make: type, write: Callable[[Any], object]) -> None:
    many = [make(a=index, b=2) for index in range(8)] + [make() for _ in range(8)]
    tables = Tables([*many, *many])
    assert tables.take_written() == []
    write(many[3])
    many[12]["a"] = 1
    assert {id(table) for table in tables.take_written()} == {id(many[3]), id(many[12])}
    many[3]["b"] = many[12]["b"] = 7
    assert tables.take_written() == []
    many[4].popitem()
    assert tables.take_written() == [many[4]]


def test_an_attribute_is_a_write_to_the_table_of_its_object() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    tables = Tables(map(vars, layers))
    layers[1].in_features = 3
    assert tables.take_written() == [vars(layers[1])]


def test_a_module_that_was_written_to_still_changes_its_mode() -> None:
    layer, dropout = nn.Linear(2, 2), nn.Dropout()
    watch = ModeWatch({"": nn.Sequential(layer, dropout)})
    words = [watch.mode()]
    layer.in_features = 3
    words.append(watch.mode())
    layer.eval()
    words.append(watch.mode())
    dropout.eval()
    words.append(watch.mode())
    assert words == ["train", "train", "train, but eval in 0", "train, but eval in 0, 1"]


def test_a_replaced_parameter_is_refused_until_it_is_back() -> None:
    layer = nn.Linear(2, 2)
    watch, before = ParameterWatch(nn.Sequential(layer)), layer.weight
    layer.weight = nn.Parameter(before.detach().clone())
    for _ in range(2):
        with pytest.raises(zerofx.UsageError, match=r"found that 0\.weight was replaced"):
            watch.check()
    layer.weight = before
    watch.check()
    layer.weight.data, layer.bias.data = layer.bias.data, layer.weight.data
    with pytest.raises(zerofx.UsageError, match=r"found that 0\.weight was replaced or moved"):
        watch.check()
