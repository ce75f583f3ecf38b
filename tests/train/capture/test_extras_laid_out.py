"""What a step hands out lies as the kernels have laid it out, whatever their fakes say of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
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


class _FilledInPlace(nn.Module):
    """A call in place keeps strides, which the same call out of place does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.rand(8, 2)), nn.Buffer(torch.rand(2, 8) > 0.5)

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        filled = self.weight.mT.clone().masked_fill_(self.mask, 2.5)
        return filled.sum(), (filled.mT, filled.mT[1:], filled.t_())


def _compare_extras(model: nn.Module, compare: Callable[[Tensor, Tensor], bool]) -> None:
    expected = [each.detach() for each in model()[1]]
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager", forward=lambda given: given()
    )
    try:
        _, extras = step()
        assert all(map(compare, extras, expected))
    finally:
        step.close()


def test_extras_have_their_values_where_fakes_say_other_strides() -> None:
    torch.manual_seed(0)
    _compare_extras(_Turned(), lambda found, wanted: torch.equal(found, wanted) and found.stride() == wanted.stride())


def test_extras_have_their_values_where_calls_in_place_kept_strides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    for _ in range(2):  # the second reads what the first has kept
        torch.manual_seed(0)
        _compare_extras(_FilledInPlace(), torch.equal)


class _AddedInPlace(nn.Module):
    """Products that BLAS is asked for in columns, of factors in each order, and of one that it gets a copy of; a row
    that lies like a column, as its reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(17, 5)), nn.Parameter(torch.randn(5, 16))
        self.second = nn.Parameter(torch.randn(8, 17))

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        halves = self.first.view(8, 10)[:, ::2].mT
        factors = (
            (self.first[:, :8], self.second),
            (self.first[:, ::2], self.second),
            (halves, self.second.mT.clone().mT),
        )
        sums = [self.weight.mT.clone().addmm_(*each, beta=0.1, alpha=3) for each in factors]
        row = self.second[:, :1].clone().mT.addmm_(self.first[:1, :2], self.first[:2, :8])
        sums += [self.weight.clone().mT.addmm_(*each) for each in factors]
        return torch.stack(sums).square().sum(), (*sums, row, row.mv(self.second[:, 1]))


def test_products_that_are_added_in_place_have_eager_modes_bits() -> None:
    torch.manual_seed(0)
    model = _AddedInPlace()
    _compare_extras(model, torch.equal)
    loss, _ = model()
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    step = zerofx.compile(model, optimizer, backend="eager", forward=lambda given: given())
    try:
        step()
        with step.full_parameters():
            for name, each in model.named_parameters():
                gradient = expected[name]
                assert gradient is not None and torch.equal(each, before[name] - gradient), name
    finally:
        step.close()
