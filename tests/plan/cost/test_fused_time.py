"""Times of compiled regions on a GPU are those of their kernels: what is inlined moves nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.chains import Stack
from zerofx.codegen.regions import regions_of
from zerofx.scheduler.cost.fusion import kernel_seconds
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost

H100 = Machine.named("h100-sxm")
ROWS, DIM, INNER = 4096, 1024, 4096
HIDDEN = 4 * ROWS * INNER  # bytes of the inner values


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, INNER), nn.Linear(DIM, INNER), nn.Linear(INNER, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def planned(**options: object) -> zerofx.PlannedStep:
    with torch.device("meta"):
        model, x = Stack(*(Gated() for _ in range(4))), torch.empty(ROWS, DIM)
    asked = {"stage": 0, "machine": H100, "backend": "inductor", **options}
    return zerofx.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), **asked)  # type: ignore[arg-type]


def test_a_layers_forward_takes_its_products_and_the_loops_between_them() -> None:
    step = planned(recompute="none").lowered
    region = regions_of(step.instructions)[0]
    products = sum(node_cost(node, H100).seconds for node in region.own if "addmm" in str(node.target))
    # Each reads and writes once: silu, which backward reads, the product with up, and the sum with x.
    num_bytes = 2 * HIDDEN + 3 * HIDDEN + 3 * 4 * ROWS * DIM
    loops = num_bytes / H100.memory_bandwidth + 3 * H100.device.launch_latency
    assert kernel_seconds(region, H100) == pytest.approx(products + loops, rel=1e-6)


def test_less_is_saved_where_backward_computes_it_in_its_kernels() -> None:
    kept, free = planned(recompute="none").plan, planned().plan
    assert len(free.recomputes) == 4 and all("silu" in decision.value for decision in free.recomputes)
    assert "computed by the kernels of backward that read it" in free.recomputes[0].reason
    assert free.step_seconds < kept.step_seconds
    assert kept.peak_bytes["device"] - free.peak_bytes["device"] >= 3 * HIDDEN


def test_every_region_has_its_time_in_the_schedule() -> None:
    step = planned()
    assert sum(row.seconds for row in step.schedule().rows) == pytest.approx(step.plan.step_seconds)


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"machine": "cpu"}, {"recompute": "none"}])
def test_nothing_is_computed_again_unasked_where_that_takes_time(options: dict[str, str]) -> None:
    assert planned(**options).plan.recomputes == ()


def test_a_budget_buys_memory_only_where_what_is_free_does_not_do() -> None:
    free, kept = planned().plan, planned(recompute="none").plan
    loose = planned(memory_budget=kept.peak_bytes["device"]).plan
    assert {d.value for d in loose.recomputes} == {d.value for d in free.recomputes}
    tight = planned(memory_budget=int(0.9 * free.peak_bytes["device"])).plan
    assert {d.value for d in tight.recomputes} > {d.value for d in free.recomputes}
