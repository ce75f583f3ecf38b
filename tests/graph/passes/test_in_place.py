"""Gathers are marked where no rank writes its slice before all ranks have read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.lib.graphs import Normed, Peeking, Prepared, Tied, TwoBlocks, calls, features, prepare, token_ids
from tests.lib.runs.offloads import parameters_away
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Role, placeholder
from zerofx.passes.in_place import InPlace, gathers_of_lasting_slices

aten = torch.ops.aten
_WHERE = Origin("", Phase.UPDATE)


def _marked(prepared: Prepared) -> dict[int, set[bool]]:
    """By bucket, how its gathers are marked."""
    found: dict[int, set[bool]] = {}
    for gather in calls(prepared.step, ops.all_gather):
        found.setdefault(int(str(gather.args[1])), set()).add(bool(gather.kwargs.get("in_place")))
    return found


def test_gathers_are_marked(golden: Callable[..., None]) -> None:
    golden(prepare().changes("in_place"))


@pytest.mark.parametrize(
    ("model", "batch"), [(TwoBlocks, features), (Tied, token_ids), (Normed, features)], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("prefetch", [0, 1, 9])
def test_a_bucket_that_is_reduced_behind_its_last_release_is_marked(
    model: type[nn.Module], batch: Callable[[], tuple[torch.Tensor, ...]], prefetch: int
) -> None:
    prepared = prepare(model(), batch(), prefetch=prefetch).run()
    for shard in prepared.step.placeholders(Role.SHARD):
        bucket = placeholder(shard).bucket
        order = prepared.step.positions()
        released = max(
            order[node]
            for gather in shard.users
            if gather.target is ops.all_gather
            for full in gather.users
            for node in full.users
            if node.target is ops.release
        )
        reduction = prepared.node(f"reduce_{bucket}")
        if released < order[reduction]:
            assert _marked(prepared)[bucket] == {True}  # type: ignore[index]  # a slice is of a bucket


def _write(prepared: Prepared, behind: str) -> None:
    with prepared.step.graph.inserting_after(prepared.node(behind)):
        insert_call(prepared.step.graph, aten.mul_.Tensor, (prepared.node("shard_0"), 0.5), _WHERE)


def test_a_slice_that_is_written_before_the_other_ranks_are_known_to_have_read_it_is_not() -> None:
    prepared = prepare().run("prefetch")
    assert prepared.node("gather_0") in gathers_of_lasting_slices(prepared.step)
    order = prepared.step.positions()
    release = max((n for n in calls(prepared.step, ops.release)), key=order.__getitem__)
    _write(prepared, release.name)
    kept = gathers_of_lasting_slices(prepared.step)
    assert prepared.node("gather_0") not in kept and kept


def test_a_gathered_buffer_that_is_written_is_not_marked() -> None:
    prepared = prepare().run("prefetch")
    full = prepared.node("full_0")
    with prepared.step.graph.inserting_after(full):
        insert_call(prepared.step.graph, aten.mul_.Tensor, (full, 0.5), _WHERE)
    kept = gathers_of_lasting_slices(prepared.step)
    assert prepared.node("gather_0") not in kept and kept


def test_a_bucket_that_is_read_behind_the_last_reduction_is_not() -> None:
    prepared = prepare(Peeking(), features(), prefetch=0).run("prefetch")
    last = max(calls(prepared.step, ops.reduce_scatter), key=prepared.step.positions().__getitem__)
    full = prepared.node("full_0")
    release = next(user for user in full.users if user.target is ops.release)
    last.append(release)
    kept = gathers_of_lasting_slices(prepared.step)
    assert prepared.node("gather_0") not in kept


def test_slices_in_a_slower_tier_are_not() -> None:
    prepared = prepare()
    prepared.plan = parameters_away(prepared, "host", None)
    prepared.run()
    assert set().union(*_marked(prepared).values()) == {False}


def test_the_pass_twice_is_the_pass_once() -> None:
    prepared = prepare().run()
    before = prepared.step.text()
    InPlace().run(prepared.step, prepared.plan)
    assert prepared.step.text() == before
