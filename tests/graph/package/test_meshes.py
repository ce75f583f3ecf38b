"""Meshes: which ranks are in a group, what is asked for, and how a plan says it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.lib.graphs import TwoBlocks, prepare
from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket
from zerofx.mesh_option import mesh_for, mesh_of
from zerofx.scheduler.plan.mesh import AXES, Axes, Mesh
from zerofx.scheduler.plan.plan import Plan

MESHES = [Mesh(*sizes) for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2, 4))]
SUBSETS: list[Axes] = [axes for size in (1, 2, 3) for axes in itertools.combinations(AXES, size)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_divide_the_ranks_and_their_places_tell_them_apart(mesh: Mesh) -> None:
    for axes in SUBSETS:
        groups = mesh.groups(axes)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.num_ranks))
        for members in groups:
            assert len(members) == mesh.size(axes)
            assert all(mesh.members(rank, axes) == members for rank in members)
            assert [mesh.index(rank, axes) for rank in members] == list(range(len(members)))
        for limit in range(mesh.num_ranks + 2):
            assert mesh.num_below(axes, limit) == sum(rank < limit for rank in groups[0])


def test_what_is_innermost_is_next_to_each_other() -> None:
    mesh = Mesh(replicate=2, shard=3, model=4)
    assert mesh.members(5, ("model",)) == (4, 5, 6, 7)
    assert mesh.members(5, ("shard",)) == (1, 5, 9)
    assert mesh.members(5, ("replicate",)) == (5, 17)
    assert mesh.members(5, ("replicate", "model")) == (4, 5, 6, 7, 16, 17, 18, 19)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shards": 2}, "called 'pipe', 'replicate', 'shard', 'model', outer to inner, found 'shards'"),
        ({"shard": 0}, "1 or more, on the axis 'shard' of a mesh, found 0"),
        ({"replicate": True}, "on the axis 'replicate' of a mesh, found True"),
        (4, "numbers of ranks by axis, such as .*, found int"),
    ],
)
def test_what_is_no_mesh_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mesh_of(given)


def test_a_mesh_has_as_many_ranks_as_there_are() -> None:
    assert mesh_for(None, 4) == mesh_of({"shard": 4}) == Mesh(shard=4)
    with pytest.raises(UsageError, match=r"expected a mesh of 4 rank.*found replicate 2 x shard 3, which is 6"):
        mesh_for(mesh_of({"shard": 3, "replicate": 2}), 4)


def slices_of(bucket: Bucket, num_ranks: int) -> list[tuple[int, int]]:
    """What each rank updates of a bucket, where it begins and ends."""
    firsts = [bucket.first_of_part(rank) for rank in range(num_ranks)]
    return [(first, first + bucket.part_numel) for first in firsts]


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.model == 1], ids=str)
def test_parts_of_slices_fill_a_bucket_and_lie_in_the_ranks_own_slices(mesh: Mesh) -> None:
    for bucket in prepare(TwoBlocks(), mesh=mesh).layout.buckets:
        parts = slices_of(bucket, mesh.num_ranks)
        assert sorted(itertools.chain(*parts))[1:-1:2] == sorted(itertools.chain(*parts))[2::2]
        assert (min(parts)[0], max(parts)[1]) == (0, bucket.numel)
        for rank, (first, last) in enumerate(parts):
            start = bucket.first_of_slice(rank)
            assert start <= first and last <= start + bucket.shard_numel
            assert bucket.saved_range(rank) == (first, last)


def test_a_plan_of_one_axis_says_nothing_of_it() -> None:
    text = prepare(TwoBlocks()).plan.to_json()
    assert not {"replicate", "model", "gathered_over", "states_over"} & set(text.split('"'))
    hybrid = prepare(TwoBlocks(), mesh=Mesh(replicate=2, shard=2)).plan
    assert Plan.from_json(hybrid.to_json()) == hybrid and hybrid.mesh == Mesh(replicate=2, shard=2)
