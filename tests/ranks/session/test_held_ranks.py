"""On several ranks a parameter outside ``full_parameters()`` is no number: whoever computes with it is told so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.lib.distributed import run_ranks
from zerofx import ShardedParametersError


def _averages() -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """What is refused, and the average of weights after three steps with what it is on one process."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    alone = nn.Linear(8, 3)
    alone.load_state_dict(model.state_dict())
    batches = [(torch.randn(4, 8), torch.randn(4, 3)) for _ in range(3)]
    averaging = get_ema_multi_avg_fn(0.9)
    average, expected = (AveragedModel(one, multi_avg_fn=averaging) for one in (model, alone))
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, backend="eager", loss_fn=nn.MSELoss()
    )
    optimizer, refused = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for x, y in batches:
        step(x, y)
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        uses: list[Callable[[], object]] = [
            lambda: average.update_parameters(model),
            lambda: model.weight.data.clamp_(-1, 1),
            lambda: torch.distributed.all_reduce(model.weight.data),
        ]
        for use in uses:
            try:
                use()
            except ShardedParametersError as error:
                refused.append(str(error))
        with step.full_parameters():
            average.update_parameters(model)
        expected.update_parameters(alone)
    found, right = (next(iter(one.parameters())).detach() for one in (average, expected))
    return refused, found, right


def test_averages_of_weights_are_refused_outside_full_parameters_and_right_inside() -> None:
    for refused, average, expected in run_ranks(_averages, 2):
        assert len(refused) == 9 and all("with step.full_parameters()" in text for text in refused)
        torch.testing.assert_close(average, expected)
