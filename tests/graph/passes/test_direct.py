"""Products that are copied into a gradient buffer are written there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.lib.graphs import DIM, Prepared, Tied, calls, prepare, token_ids
from zerofx.ir import ops
from zerofx.ir.edit import consumers
from zerofx.scheduler.cost.liveness import liveness

aten = torch.ops.aten


class Cubed(nn.Module):
    """A layer whose weight's gradient is multiplied once it is made: the loss reads the weight scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.linear(x, self.linear.weight * 3.0).sum()
        return loss


class Transposed(nn.Module):
    """A weight that is stored as its transpose is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * DIM, DIM).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x @ self.weight).square().sum()
        return loss


def _written(prepared: Prepared) -> int:
    return len(calls(prepared.step, aten.mm.out))


@pytest.mark.parametrize("stage", [0, 3])
def test_products_are_written_where_they_are_copied_to(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage).changes("direct"))


def test_every_slot_is_still_written_once() -> None:
    prepared = prepare().run("direct")
    for buffer in calls(prepared.step, ops.empty_gradients):
        bucket = prepared.layout.buckets[int(str(buffer.args[0]))]
        writes = [n for n in consumers(buffer) if n.target in (aten.mm.out, aten.copy_.default)]
        assert len(writes) == len(bucket.slots)
    assert _written(prepared) == 3


def test_a_product_that_is_not_the_gradient_itself_keeps_its_memory() -> None:
    assert _written(prepare(Cubed()).run("direct")) == 0


def test_a_sum_of_two_gradients_is_copied() -> None:
    prepared = prepare(Tied(), token_ids()).run("direct")
    assert _written(prepared) == 2  # both blocks' weights, and not the one that embedding and head share
    assert len(calls(prepared.step, aten.copy_.default)) == 1


def test_a_weight_laid_out_otherwise_gets_a_product_of_its_layout_or_a_copy() -> None:
    prepared = prepare(Transposed()).run("direct")
    for product in calls(prepared.step, aten.mm.out):
        slot = product.kwargs["out"]
        assert isinstance(slot, torch.fx.Node) and slot.meta["val"].stride() == product.meta["val"].stride()


def test_only_the_first_micro_batch_is_written_directly() -> None:
    prepared = prepare(num_micro_batches=2).run("direct")
    assert _written(prepared) == 3
    assert len(calls(prepared.step, aten.add_.Tensor)) == 3


def test_the_product_takes_no_memory_of_its_own() -> None:
    peaks = []
    for until in ("reduce", "direct"):
        prepared = prepare(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False)),
                           (torch.ones(1, 64),), loss_fn=lambda y, *_: y.sum(), num_ranks=1)  # fmt: skip
        peaks.append(liveness(prepared.run(until).step, on_cpu=True).peak_bytes)
    assert peaks[0] - peaks[1] == 64 * 64 * 4


class TwoHeads(nn.Module):
    """A layer, and two output layers of one bucket: the smaller one's gradient is there long before a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.between = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.head(self.between(self.layers[0](x))), 1).mean()


def test_a_product_well_before_a_buffer_that_is_made_late_is_copied_to_it() -> None:
    prepared = prepare(TwoHeads(), (torch.randn(4, 8),)).run("direct")
    (bucket,) = [b for b in prepared.layout.buckets if any(slot.name == "head.weight" for slot in b.slots)]
    order = prepared.step.positions()
    (buffer,) = [n for n in calls(prepared.step, ops.empty_gradients) if n.args[0] == bucket.index]
    writes = {node.target for node in consumers(buffer) if order[node] > order[buffer]}
    assert writes == {aten.mm.out, aten.copy_.default, ops.reduce_scatter, ops.wait}
