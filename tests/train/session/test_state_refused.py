"""Python state that goes on changing where no step can follow is refused by its name, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.runs.pairs import compile_eager
from tests.lib.runs.refusals import sgd
from zerofx import UsageError

# Each captures what it changes.
pytestmark = pytest.mark.captures


class Scaled(nn.Module):
    """A linear layer whose outputs are scaled by what ``scale`` is made of."""

    def __init__(self, scale: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.scale, self.use = nn.Linear(4, 4), scale, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.scale, self.linear(x)).square().mean()


def _functions(scale: float) -> Callable[[Tensor], Tensor]:
    made: Callable[[Tensor], Tensor] = eval(f"lambda y: y * {scale}")  # of other code each time
    return made


REFUSED: dict[str, tuple[Callable[[int], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "tensor": (
        lambda n: torch.full((), float(n)), lambda scale, y: y * scale,
        r"to settle.* found model.scale from one Tensor to another after 8 captures.*pass what changes as a tensor",
    ),
    "module": (
        lambda n: [nn.Softplus(beta=n)], lambda scale, y: scale[0](y),
        r"to settle.* found model.scale\[0\] from one Softplus to another after 8 captures",
    ),
    "function": (
        _functions, lambda scale, y: scale(y),
        r"to settle.* found model.scale from one <lambda> \(line \d+\) to another,.* after 8 captures",
    ),
    "number in a tuple": (
        lambda n: (float(n),), lambda scale, y: y * scale[0],
        r"another can take its place.* found model.scale\[0\] from 3.0 to 4.0 in a tuple.*: keep it elsewhere",
    ),
    "length": (
        lambda n: [1.0] * n, lambda scale, y: y * len(scale),
        r"to settle.* found model.scale \(items\) from 8 to 9, .* after 8 captures",
    ),
    "exponent": (
        float, lambda scale, y: y**scale,
        r"tensors are added to.* found model.scale from 3.0 to 4.0, which the forward uses otherwise: compute with",
    ),
}  # fmt: skip


@pytest.mark.days(3)
@pytest.mark.parametrize(("scale", "use", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_changes_in_each_step_is_named(
    scale: Callable[[int], Any], use: Callable[[Any, Tensor], Tensor], match: str
) -> None:
    model = Scaled(scale(1), use)
    step = compile_eager(model, sgd(model))

    def train() -> None:
        for count in range(1, 12):
            model.scale = scale(count)
            step(torch.ones(2, 4))

    with pytest.raises(UsageError, match=match):
        train()
    step.close()
