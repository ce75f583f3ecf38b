"""What each rank's model returns with its loss, and the means over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import RankMismatchError


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        largest = x.max()
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "largest": largest, "x": x}


def _told(stage: int) -> tuple[Any, Any, float, str]:
    torch.manual_seed(0)
    model = Telling()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), 0.1), stage, backend="eager")
    loss = step(torch.full((2, 4), 1.0 + world()[0]))
    own, means = step.outputs, step.average(step.outputs)
    with pytest.raises(RankMismatchError) as unlike:
        step.average([loss] * (1 + world()[0]))
    return {k: None if v is None else v.item() for k, v in own.items()}, means, step.average(loss), str(unlike.value)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_outputs_and_their_means(stage: int) -> None:
    (first, means, loss, told), (second, others, _, _) = run_ranks(_told, 2, stage)
    assert (first["largest"], second["largest"]) == (1.0, 2.0)
    assert means == others == {"loss": (first["loss"] + second["loss"]) / 2, "largest": 1.5, "x": None}
    assert loss == means["loss"]
    assert "how many numbers there are" in told
