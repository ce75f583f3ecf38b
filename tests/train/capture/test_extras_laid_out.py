"""What a step hands out lies as the kernels have laid it out, whatever their fakes say of that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zerofx


class _Turned(nn.Module):
    """A power of a scalar is laid out row by row by its kernel, and as its exponent by the kernel's fake."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 8))

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        powers = torch.pow(0.9, self.weight.mT)
        return powers.sum(), (powers, powers[1:], powers.mT, self.weight.mT * 2)


def test_extras_have_their_values_where_fakes_say_other_strides() -> None:
    torch.manual_seed(0)
    model = _Turned()
    expected = [each.detach() for each in model()[1]]
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager", forward=lambda given: given()
    )
    try:
        _, extras = step()
        for found, wanted in zip(extras, expected, strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    finally:
        step.close()
