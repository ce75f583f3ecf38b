"""Parameters become views of flat buckets: whole ones at stages 0 to 2, gathered ones at stage 3."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.lib.graphs import Tied, calls, prepare, token_ids
from zerofx.ir.facts import Role, placeholder, tensor

aten = torch.ops.aten


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_become_views_of_buckets(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage).changes("shard"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_one_rank_every_stage_holds_whole_buckets(stage: int) -> None:
    prepared = prepare(stage=stage, num_ranks=1).run("shard")
    assert {placeholder(node).role for node in prepared.step.placeholders()} == {Role.INPUT, Role.FULL}


def test_a_view_has_the_parameters_shape_at_its_slot() -> None:
    prepared = prepare(num_ranks=1).run("shard")
    views = calls(prepared.step, aten.as_strided.default)
    slots = [slot for bucket in prepared.layout.buckets for slot in bucket.slots]
    assert len(views) == len(slots)
    for slot in slots:
        (view,) = [node for node in views if node.name.startswith(slot.name.replace(".", "_"))]
        assert view.args[1:] == (list(slot.shape), list(slot.stride), slot.offset)


def test_tied_weights_are_one_slot_and_one_view() -> None:
    prepared = prepare(Tied(), token_ids()).run("shard")
    names = [slot.name for bucket in prepared.layout.buckets for slot in bucket.slots]
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    (view,) = [n for n in calls(prepared.step, aten.as_strided.default) if n.name.startswith("embed_weight")]
    assert {aten.embedding.default, aten.t.default} <= {user.target for user in view.users}


def test_a_lower_compute_dtype_brings_a_master_slice_in_the_stored_one() -> None:
    prepared = prepare(precision="bf16").run("shard")
    masters = list(prepared.step.placeholders(Role.MASTER))
    assert {tensor(node).dtype for node in masters} == {torch.float32}
    assert {tensor(node).dtype for node in prepared.step.placeholders(Role.SHARD)} == {torch.bfloat16}
    assert [tensor(node).numel() for node in masters] == [b.shard_numel for b in prepared.layout.buckets]
