"""The updates of later steps are known before the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerofx.optimizers import trace_update
from zerofx.optimizers.ahead import programs_ahead


@pytest.mark.parametrize(
    ("kind", "options", "num_updates"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 2),
        (torch.optim.AdamW, {}, 1),
        (torch.optim.RAdam, {}, 2),
    ],
)
def test_an_update_that_changes_is_seen_to(kind: Any, options: dict[str, Any], num_updates: int) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], **options)
    group = optimizer.param_groups[0]
    first = trace_update(optimizer, group)
    ahead = programs_ahead(optimizer, group, first, {})
    assert len(ahead) == num_updates
    assert ahead[0] is first
    assert not optimizer.state
