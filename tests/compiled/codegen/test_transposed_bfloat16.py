"""Kernels that transpose bfloat16 give what eager mode does, however many a region has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib import compiling

pytestmark = compiling.regions


class _Causal(nn.Module):
    """A convolution over what came before: values are transposed there, padded, and transposed back."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.norm, self.end = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 128)
        self.convolution = nn.Conv1d(64, 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        mixed = self.convolution(F.pad(self.norm(x).transpose(1, 2), (3, 0))).transpose(1, 2)
        loss: Tensor = self.end(x + mixed).float().square().mean()
        return loss


@pytest.mark.days(3)
def test_several_transposed_values_of_a_region_are_whole() -> None:
    losses = {}
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = _Causal()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = zerofx.compile(model, optimizer, precision="bf16", backend=backend)
        x = torch.randn(4, 32, 16)
        losses[backend] = [step(x).item() for _ in range(3)]
    assert losses["inductor"] == pytest.approx(losses["eager"], rel=1e-3)
