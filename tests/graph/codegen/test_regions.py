"""Where a step is cut into regions, and which regions are equal."""

from __future__ import annotations

import pytest
from torch import nn

from tests.lib.graphs import Averaging, Normed, Prepared, Shifts, Tied, TwoBlocks, features, prepare, token_ids
from tests.lib.lowered import Deep
from zerofx.codegen.regions import Event, Region, cut, is_free_view
from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin

_MODELS = [
    (TwoBlocks, features), (Averaging, features), (Tied, token_ids), (Normed, features), (Shifts, features),
]  # fmt: skip


def _regions(prepared: Prepared) -> list[Region]:
    return [item for item in cut(prepared.step) if isinstance(item, Region)]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("model", "batch"), _MODELS)
def test_every_node_that_computes_runs_once_and_in_order(model: type[nn.Module], batch: object, stage: int) -> None:
    prepared = prepare(model(), token_ids() if batch is token_ids else None, stage=stage).run()
    ran = []
    for item in cut(prepared.step):
        mine = [item.node] if isinstance(item, Event) else [node for node in item.nodes if node in item.own]
        ran += [node for node in mine if not is_free_view(node)]
    assert ran == [node for node in prepared.step.calls() if not is_free_view(node)]


@pytest.mark.parametrize(("model", "batch"), _MODELS)
def test_views_never_cross_a_border(model: type[nn.Module], batch: object) -> None:
    prepared = prepare(model(), token_ids() if batch is token_ids else None).run()
    for region in _regions(prepared):
        assert not [node.name for node in (*region.inputs, *region.outputs) if is_free_view(node)]


@pytest.mark.parametrize(("model", "batch"), _MODELS)
def test_a_region_is_in_one_unit_and_holds_no_event(model: type[nn.Module], batch: object) -> None:
    prepared = prepare(model(), token_ids() if batch is token_ids else None).run()
    for region in _regions(prepared):
        work = [node for node in region.own if not is_free_view(node)]
        assert {prepared.step.unit_of(node) for node in work} == {region.unit}
        assert len({origin(node).phase is Phase.UPDATE for node in work}) == 1
        assert not {node.target for node in region.nodes} & ops.EVENTS


def test_only_the_region_around_the_loss_is_in_two_phases() -> None:
    prepared = prepare(Deep(4)).run()
    phases = [{origin(node).phase for node in region.own if not is_free_view(node)} for region in _regions(prepared)]
    assert [len(found) for found in phases].count(2) == 1
    turn = next(region for region, found in zip(_regions(prepared), phases, strict=True) if len(found) == 2)
    assert prepared.step.loss in turn.own


def test_equal_layers_share_a_region_and_depth_adds_none() -> None:
    distinct = [{region.key for region in _regions(prepare(Deep(depth)).run())} for depth in (4, 6)]
    assert distinct[0] == distinct[1]
    forward = [region.key for region in _regions(prepare(Deep(4)).run()) if region.origin.phase is Phase.FORWARD]
    assert len(forward) == 5 and len(set(forward)) == 2


def test_layers_of_other_shapes_have_regions_of_their_own() -> None:
    narrow, wide = (
        {region.key for region in _regions(prepare(TwoBlocks(), (batch,)).run()) if region.unit or region.is_update}
        for batch in (features()[0], features()[0].repeat(2, 1))
    )
    updates = {region.key for region in _regions(prepare().run()) if region.is_update}
    assert narrow & wide == updates


def test_a_gathered_bucket_has_one_name_outside_regions() -> None:
    prepared = prepare().run()
    fulls = {node for node in prepared.step.calls() if node.name.startswith("full_") and node.target is ops.wait}
    released: set[object] = set()
    for item in cut(prepared.step):
        if isinstance(item, Event) and item.node.target is ops.release:
            released.add(item.node.args[0])
        if isinstance(item, Region):
            assert not set(item.outputs) & fulls
            assert not set(item.inputs) & released
    assert released == fulls


def test_what_leaves_a_region_is_read_elsewhere() -> None:
    prepared = prepare(Normed()).run()
    for region in _regions(prepared):
        for node in region.outputs:
            readers = set(node.users)
            assert readers - set(region.own) or any(is_free_view(user) for user in readers)
