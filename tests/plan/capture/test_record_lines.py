"""A record's text is that of the graph which is made of it, and its fake tensors are those that torch would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.models import DIM, ROWS, Regression
from zerofx.capture.by_layer.forward_record import record_forward
from zerofx.capture.traceable import Forward, traceable
from zerofx.ir.batch import Batch
from zerofx.ir.canonical import Number, canonical
from zerofx.torch_private.capture import fake_device, fake_mode

BATCH = Batch.from_call((torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)), {})


class Various(Regression):
    """Calls of several results, lists of tensors, keywords, a slice, a literal, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def predict(self, x: Tensor) -> Tensor:
        first, second = self.norm(x).chunk(2, dim=1)
        values, _ = torch.cat([second, first], dim=1).sort(dim=1, descending=True)
        out = values[:, : DIM // 2].sum(dim=1, keepdim=True, dtype=torch.float32) + x * torch.tensor(0.5)
        assert isinstance(out, Tensor)
        return out


class Halves(torch.autograd.Function):
    """Two halves, of which the backward reads one again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int) -> tuple[Tensor, ...]:
        halves = tuple(half.tanh() for half in x.chunk(2, dim=1))
        ctx.save_for_backward(halves[index], None)
        return halves

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        result, _ = ctx.saved_tensors
        return torch.cat([gradient * result for gradient in gradients], dim=1), None


class InHalves(Regression):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(DIM, DIM), index

    def predict(self, x: Tensor) -> Tensor:
        return torch.cat(Halves.apply(self.linear(x), self.index), dim=1)  # type: ignore[no-untyped-call]  # torch's


def test_text_names_the_result_that_a_backward_reads() -> None:
    first, again, second = (record_forward(Forward(InHalves(index), BATCH)).text() for index in (0, 0, 1))
    assert first == again != second


def test_text_of_lines_is_that_of_their_graph() -> None:
    record = record_forward(Forward(Various(), BATCH, num_micro_batches=2))
    graph = record.graph()
    graph.lint()
    assert canonical(graph) == record.canonical()
    assert "output output" in record.text() and len(graph.nodes) == len(record.lines)


def test_a_number_is_a_place() -> None:
    assert Number.from_place(12).place == 12
    assert f"{(Number.from_place(12), 'x')}" == "(%12, 'x')"


@pytest.mark.parametrize("requires_grad", [True, False])
def test_fake_parameters_are_those_that_torch_makes(requires_grad: bool) -> None:
    model = nn.Linear(DIM, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros(1, DIM + 1)[:, 1:], requires_grad=requires_grad)
    with fake_mode():
        empty = torch.empty_strided(model.weight.shape, model.weight.stride())
    expected = nn.Parameter(empty, requires_grad=requires_grad)
    with traceable(Forward(model, BATCH), compiled=False):
        found = model.weight
        assert isinstance(found, nn.Parameter) and type(found) is type(expected)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert (found.requires_grad, found.is_leaf, found.grad_fn) == (requires_grad, True, None)
        assert (found._version, found._is_view()) == (expected._version, expected._is_view())
        assert fake_device(found) == fake_device(expected) == torch.device("cpu")
        assert torch._C._dispatch_keys(found) == torch._C._dispatch_keys(expected)
