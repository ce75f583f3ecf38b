from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import Block, Prepared, prepare
from tests.lib.runs.offloads import offloading
from zerofx.codegen.regions import Region, cut, is_free_view
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.scheduler.plan.decisions import Absence

aten = torch.ops.aten


class ThreeBlocks(nn.Module):
    """Blocks that transpose their input, so that backward reads views of it; the last reads the first one's too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x).t()).t()
        y = torch.tanh(self.layers[1](first).t()).t()
        loss: Tensor = (torch.tanh(self.layers[2](y)) * first).sum()
        return loss


def offloaded(near: bool = False) -> Prepared:
    prepared = prepare(ThreeBlocks())
    prepared.plan = offloading(prepared, prepared.plan, ["host", "nvme"], near=near)
    return prepared


@pytest.mark.parametrize("near", [False, True])
def test_values_are_copied_out_and_back(golden: Callable[..., None], near: bool) -> None:
    golden(offloaded(near).changes("offload"))


@pytest.mark.parametrize("near", [False, True])
def test_no_units_run_is_cut_in_two(near: bool) -> None:
    assert _runs(offloaded(near)) == _runs(prepare(ThreeBlocks()))


def _runs(prepared: Prepared) -> Counter[tuple[str, Phase]]:
    """How many regions have nodes of each unit and phase: around the loss one region may be in two phases."""
    regions = [one for one in cut(prepared.run().step) if isinstance(one, Region)]
    return Counter(
        (region.unit, phase)
        for region in regions
        for phase in {origin(node).phase for node in region.own if not is_free_view(node)}
    )


def test_copies_back_that_start_at_one_place_take_the_link_in_the_order_in_which_they_are_read() -> None:
    prepared = prepare(ThreeBlocks())
    plan, order = offloading(prepared, prepared.plan, ["host"], near=False), prepared.step.positions()
    by_name = prepared.step.nodes_by_name()
    first = min((decision.reload_before for decision in plan.offloads), key=lambda names: order[by_name[names[0]]])
    offloads = (replace(decision, reload_before=first) for decision in plan.offloads)
    prepared.plan = plan.replace_absences(offloads=tuple(offloads))
    calls = list(prepared.run().step.calls())
    started = [node for node in calls if node.target is ops.reload]
    awaited = [node.args[0] for node in calls if node.target is ops.wait and node.args[0] in started]
    assert len(started) > 2
    assert started == awaited


def test_a_plan_without_offloads_changes_nothing() -> None:
    prepared = prepare(ThreeBlocks())
    before = prepared.step.text()
    assert prepared.run("offload").step.text() == before


def _refused(message: str, **changed: Any) -> None:
    prepared = offloaded()
    first = next(decision for decision in prepared.plan.offloads if decision.value == "tanh")
    prepared.plan = prepared.plan.replace_absences(offloads=(replace(first, **changed),))
    before = prepared.step.text()
    with pytest.raises(PlanError, match=message):
        prepared.run("offload")
    assert prepared.step.text() == before


@pytest.mark.parametrize("where", ["value", "free_after", "reload_before"])
def test_a_node_that_is_not_there_is_refused(where: str) -> None:
    _refused("names node nowhere, which this graph has not", **{where: "nowhere" if where == "value" else ("nowhere",)})


@pytest.mark.parametrize("tier", ["device", "tape"])
def test_another_tier_is_refused(tier: str) -> None:
    _refused(f"expected tanh to be offloaded to host or nvme, found tier '{tier}'", tier=tier)


def test_values_that_cannot_be_offloaded_are_refused() -> None:
    _refused("expected to offload a tensor that forward computes, found batch_0", value="batch_0")
    _refused("expected to offload a value with memory of its own, found t_1", value="t_1")
    _refused("that it does not read sum_1|found a result: sum_1", value="sum_1")
    _refused("expected to offload a tensor that forward computes, found mm_3", value="mm_3")


def test_another_order_is_refused() -> None:
    prepared = offloaded()
    first = next(decision for decision in prepared.plan.offloads if decision.value == "tanh")
    _refused("found another order", free_after=first.reload_before, reload_before=first.free_after)
    _refused("found another order", free_after=("mm",))
    _refused("found another order", reload_before=first.free_after)


def test_a_value_that_is_offloaded_twice_is_refused() -> None:
    prepared = offloaded()
    first: Absence = prepared.plan.offloads[0]
    prepared.plan = prepared.plan.replace_absences(offloads=(first, replace(first, tier="nvme")))
    with pytest.raises(PlanError, match="offloaded twice"):
        prepared.run("offload")


def test_a_value_that_is_written_in_place_is_refused() -> None:
    prepared = offloaded()
    value = prepared.node("tanh")
    with prepared.step.graph.inserting_after(value):
        written = prepared.step.graph.call_function(aten.mul_.Tensor, (value, 2.0))
    written.meta.update(value.meta)
    prepared.plan = prepared.plan.replace_absences(
        offloads=tuple(d for d in prepared.plan.offloads if d.value == value.name)
    )
    with pytest.raises(PlanError, match="written in place, found tanh"):
        prepared.run("offload")
