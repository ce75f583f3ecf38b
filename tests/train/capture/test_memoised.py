"""A forward may call functions that remember tensors which they have made."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.models import DIM, Case, Regression, batches, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.capture.trace import capture
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch


def _table(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


class _Remembering(Regression):
    def __init__(self, table: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.table = [table]  # where a copy has the same

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.table[0](DIM)
        return y


def _case(table: Callable[[int], Tensor]) -> tuple[Case, Batch]:
    case = Case(lambda: _Remembering(table), rows)
    args, keywords = next(batches(case, 1, 1))
    return case, Batch.from_call(args, keywords)


def test_a_table_that_a_function_remembers_is_made_in_each_step_and_remembered_with_values() -> None:
    table = functools.cache(_table)
    case, _ = _case(table)
    trained = train_compiled(case, 3, 3)
    assert torch.equal(table(DIM), _table(DIM))
    assert differences(train_plain(case, 3), trained) == []


def test_a_trace_alone_leaves_nothing_to_remember() -> None:
    table = functools.lru_cache(maxsize=2)(_table)
    case, batch = _case(table)
    capture(case.model(), batch)
    assert table.cache_info().currsize == 0


def test_a_table_that_is_remembered_elsewhere_is_to_be_made_before() -> None:
    tables = dict[int, Tensor]()
    case, batch = _case(lambda size: tables.setdefault(size, _table(size)))
    with pytest.raises(CaptureError, match="left in a dict or the like: call the model once in a fresh process"):
        capture(case.model(), batch)
    tables.clear()
    case.model()(*batch.call[0], **batch.call[1])
    capture(case.model(), batch)
