"""Collectives that a model calls itself are part of the step: the same bits as under DDP, at every stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import DIM, ROWS, Case, Layer, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.errors import CaptureError, RankMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


class Contrastive(Regression):
    """Every row of every rank is told from those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Layer(), Layer()

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.all_gather(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x)), F.normalize(self.right(y))
        positive = (left * right).sum(-1)
        return (torch.logsumexp(left @ self.gather(right).t(), -1) - positive).mean()


class Functional(Contrastive):
    """With torch's functional collectives."""

    def gather(self, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        gathered: Tensor = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        return gathered


class Detached(Contrastive):
    """Of other ranks only values, less their mean over all ranks."""

    def gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        whole = x.new_empty(len(parts) * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole, x.detach().contiguous())
        mean, largest = x.detach().mean(0), x.detach().amax(0)
        dist.all_reduce(mean)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return torch.cat(parts) * whole - mean / len(parts) - largest


class Reduced(Contrastive):
    """Reduced with a gradient."""

    def gather(self, x: Tensor) -> Tensor:
        reduced: Tensor = torch.distributed.nn.all_reduce(x.clone())
        return reduced


MODELS = [Contrastive, Functional, Detached, Reduced]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _on_ranks() -> list[list[str]]:
    cases = [(Case(model, rows, optimizer=_adam), stage) for model in MODELS for stage in (0, 3)]
    return [differences(train_plain(case, 3), train_compiled(case, stage, 3)) for case, stage in cases]


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_collectives_of_a_model_are_the_same_as_under_ddp(num_ranks: int) -> None:
    assert run_ranks(_on_ranks, num_ranks) == [[[]] * 2 * len(MODELS)] * num_ranks


class Sending(Contrastive):
    def gather(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        dist.broadcast(x, 0)
        return x


def _refused() -> str:
    model = Sending()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, backend="eager")
    with pytest.raises(CaptureError) as caught:
        step(torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM))
    return str(caught.value)


def test_other_collectives_are_refused_with_their_line() -> None:
    for message in run_ranks(_refused, 2):
        assert "found c10d::broadcast_ at" in message and "dist.broadcast(x, 0)" in message


class Ranked(Contrastive):
    """A graph of its own on each rank."""

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x) + dist.get_rank()


def _differing() -> str:
    model = Ranked()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, backend="eager")
    with pytest.raises(RankMismatchError) as caught:
        step(torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM))
    return str(caught.value)


def test_a_graph_that_depends_on_the_rank_is_told_so_with_the_way_out() -> None:
    for message in run_ranks(_differing, 2):
        assert "pass it as a tensor in the batch: step(x, rank=torch.tensor(rank))" in message
