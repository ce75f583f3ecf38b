"""Linear algebra raises an error where there is no result: in a step as in eager mode, whoever reads the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import zerofx
from tests.lib.models import DIM, Case, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.capture.trace import capture
from zerofx.ir import ops
from zerofx.ir.batch import Batch

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)


class Inverted(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM) + 0.01 * torch.randn(DIM, DIM))

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = x @ torch.linalg.inv(self.weight)
        return y


class Factored(Inverted):
    """Reads both factors, and solves with several matrices at once."""

    def predict(self, x: Tensor) -> Tensor:
        lower: Tensor = torch.linalg.cholesky(self.weight @ self.weight.t() + torch.eye(DIM))
        several: Tensor = torch.linalg.solve(torch.stack([self.weight, lower]), x.t().expand(2, DIM, -1))
        return several.sum(0).t() @ lower


class Orthogonal(Regression):
    """Layers that each solve for their weight, captured as one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(orthogonal(nn.Linear(DIM, DIM), orthogonal_map="cayley") for _ in range(5)))

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model", [Inverted, Factored, Orthogonal])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_results_that_are_checked_train_as_in_eager_mode(model: type[nn.Module], num_micro_batches: int) -> None:
    case = Case(model, rows)
    found = train_compiled(case, 3, 3, accumulate=num_micro_batches)
    assert differences(train_plain(case, 3, num_micro_batches), found) == []


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_matrix_without_an_inverse_ends_the_step_before_anything_is_updated(backend: Any) -> None:
    torch.manual_seed(0)
    model, batch = Inverted(), (torch.randn(4, DIM), torch.randn(4, DIM))
    fresh = copy.deepcopy(model.state_dict())
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), backend=backend, stage=3)
    first = step(*batch)
    with torch.no_grad(), step.full_parameters(write_back=True):
        model.weight.zero_()
    with pytest.raises(RuntimeError, match="inversion could not be completed") as caught:
        step(*batch)
    assert type(caught.value).__name__ == "_LinAlgError"  # torch.linalg.LinAlgError, which torch's stubs lack
    assert caught.value.__notes__ == ["zerofx: when step 2 failed, nothing had been updated yet"]
    with step.full_parameters(write_back=True):
        model.load_state_dict(fresh)
    assert torch.equal(step(*batch), first)


def test_backward_reads_what_was_checked_too() -> None:
    """So that what was not checked goes at once."""
    step = capture(Inverted(), Batch.from_call((torch.randn(4, DIM), torch.randn(4, DIM)), {}))
    (check,) = step.graph.find_nodes(op="call_function", target=ops.checked)
    assert list(check.args[0].users) == [check]
    assert len(check.users) > 1
