"""An option that needs a state of the first step, switched on later: refused in words, and training goes on without."""

from __future__ import annotations

import pytest
import torch

from tests.lib.runs.pairs import compile_eager
from tests.lib.users import ids, same_parameters, tiny
from zerofx import OptimizerError


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_amsgrad_that_is_switched_on_is_refused_and_can_be_switched_off(kind: type[torch.optim.AdamW]) -> None:
    trained = []
    for toggles in (True, False):
        model = tiny()
        optimizer = kind(model.parameters(), lr=0.1)
        step = compile_eager(model, optimizer)
        step(ids(), labels=ids(1))
        if toggles:
            optimizer.param_groups[0]["amsgrad"] = True
            with pytest.raises(OptimizerError, match=r"looks for 'max_exp_avg_sq'.*amsgrad.*switch it off again"):
                step(ids(), labels=ids(1))
            optimizer.param_groups[0]["amsgrad"] = False
        step(ids(), labels=ids(1))
        step.close()
        trained.append(model)
    assert same_parameters(*trained)
