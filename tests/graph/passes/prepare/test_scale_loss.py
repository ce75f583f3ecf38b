"""Backward of a scaled loss begins with the scale, an input of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import captured, difference, prepare
from zerofx.ir.facts import Phase, Role, origin, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.scale_loss import ScaleLoss


class _OwnBackward(torch.autograd.Function):
    """Its backward makes a constant of its own before it reads the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch.ones((), dtype=gradient.dtype) * 2 * gradient


class _Scalar(nn.Module):
    """The gradient of its parameter is the loss's own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self.weight) + x.sum()


def _scaled(function: Callable[[Tensor], Tensor], precision: torch.dtype | None = None) -> StepGraph:
    step = captured(_Scalar(function), torch.ones(3), precision=precision)
    ScaleLoss().run(step)
    return step


def test_backward_begins_with_a_copy_of_the_scale(golden: Callable[..., None]) -> None:
    before = prepare(precision="fp16").step.text()
    golden(difference(before, prepare(precision="fp16", loss_scaled=True).step.text()))


@pytest.mark.parametrize(("precision", "names"), [(torch.float16, ["float32", "float16"]), (None, ["float32"])])
def test_the_scale_comes_in_float32_and_in_the_losss_dtype(precision: torch.dtype | None, names: list[str]) -> None:
    step = _scaled(lambda weight: weight * 3, precision)
    scales = list(step.placeholders(Role.LOSS_SCALE))
    assert [placeholder(node).name for node in scales] == names
    assert [str(tensor(node).dtype) for node in scales] == [f"torch.{name}" for name in names]
    assert step.loss_scale is scales[0]


@pytest.mark.parametrize("function", [lambda weight: weight.clone(), _OwnBackward.apply])
def test_what_takes_the_place_of_the_losss_gradient_is_a_call_and_all_that_backward_begins_with(
    function: Callable[[Tensor], Tensor],
) -> None:
    step = _scaled(function)
    seed = next(node for node in step.calls() if origin(node).phase is Phase.BACKWARD)
    scale = step.loss_scale
    assert scale is not None and seed.args == (scale,) and list(scale.users) == [seed]
    reached = {seed}
    for node in step.calls():
        if reached & set(node.all_input_nodes):
            reached.add(node)
    assert step.gradients["weight"] in reached


def test_every_micro_batch_begins_with_the_same_scale() -> None:
    step = prepare(precision="fp16", loss_scaled=True, num_micro_batches=3).step
    _, scale = step.placeholders(Role.LOSS_SCALE)
    assert len(scale.users) == 3
