"""Products that are scaled as they are added train on the default backend as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib import compiling

pytestmark = compiling.trainings


class _Scaled(nn.Module):
    def __init__(self, combine: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.combine = combine
        self.base, self.down, self.up = (nn.Parameter(torch.rand(shape) + 0.5) for shape in ((4, 8), (8, 2), (2, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self.base, x @ self.down, self.up).square().mean()


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda base, low, up: torch.add(base, low @ up, alpha=0.1),
    "add_": lambda base, low, up: (base * 1).add_(low @ up, alpha=0.1),
    "sub": lambda base, low, up: torch.sub(low @ up, base, alpha=0.1),
    "addmm": lambda base, low, up: torch.addmm(base, low, up, beta=0.5, alpha=0.1),
    "addmm of a row": lambda base, low, up: torch.addmm(base[0], low, up, beta=0.5, alpha=0.1),
}


@pytest.mark.days(3)
def test_products_that_are_scaled_as_they_are_added() -> None:
    """In one model, so that there is one start."""
    torch.manual_seed(0)
    model = nn.ModuleList(map(_Scaled, _FORMS.values()))
    x = torch.randn(4, 8)

    def losses(parts: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        each = torch.stack([part(x) for part in parts])
        return each.sum(), each

    expected = losses(model, x)[1].detach()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, forward=losses)
    try:
        _, found = step(x)
        torch.testing.assert_close(found, expected)
        wanted = losses(model, x)[1].detach()
        torch.testing.assert_close(step(x)[1], wanted)
    finally:
        step.close()


@pytest.mark.parametrize("scales", [{"beta": 0.5}, {"alpha": 0.1}, {"beta": 0, "alpha": 2}], ids=str)
def test_what_a_kernel_of_ours_holds_is_known_of_unscaled_products_alone(scales: dict[str, float]) -> None:
    from zerofx.ir.operators.products import OPERATORS

    own = OPERATORS["addmm"].own_kernel
    operands = torch.empty(512), torch.empty(512, 512), torch.empty(512, 512)
    assert own is not None and own.inside(*operands) is not None and own.inside(*operands, **scales) is None
