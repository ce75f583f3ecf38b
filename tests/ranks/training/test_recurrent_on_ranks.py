"""Recurrent layers on two ranks have the bits of eager mode at all stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.lib.distributed import run_ranks
from tests.lib.models import Case
from tests.lib.runs.training import differences, train_compiled, train_plain


class _Recurrent(nn.Module):
    """An LSTM that oneDNN runs, and a GRU whose time steps are ATen's."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, dropout=0.2)
        self.gru = nn.GRU(7, 9, bidirectional=True)
        self.head = nn.Linear(18, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.gru(self.lstm(x)[0])[0]).square().mean()
        return loss


_CASE = Case(_Recurrent, lambda generator: ((torch.randn(6, 3, 5, generator=generator),), {}))


def _compare() -> list[list[str]]:
    expected = train_plain(_CASE, 3)
    return [differences(expected, train_compiled(_CASE, stage, 3)) for stage in (0, 1, 3)]


def test_recurrent_layers_on_two_ranks_have_the_bits_of_eager_mode() -> None:
    assert run_ranks(_compare, 2) == [[[], [], []]] * 2
