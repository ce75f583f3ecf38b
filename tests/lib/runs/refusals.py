"""Steps that are refused, and leave model and optimizer as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.lib.runs.pairs import compile_eager
from tests.lib.users import untouched
from zerofx import ZeroFXError


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused_step(
    model: nn.Module, batch: tuple[Any, ...], error: type[ZeroFXError], match: str, **options: Any
) -> None:
    """Both ways to the first capture refuse; after the first the model is free, after both it trains eagerly."""
    optimizer = sgd(model)
    with untouched(model, optimizer):
        with pytest.raises(error, match=match):
            compile_eager(model, optimizer, example_batch=batch, **options)
        step = compile_eager(model, optimizer, **options)
        with pytest.raises(error, match=match):
            step(*batch)
        step.close()
