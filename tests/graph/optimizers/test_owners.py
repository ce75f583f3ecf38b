"""Owners of whole parameters: each element reaches its owner once, and all ranks choose the same owners, evenly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.ir.bucketing import make_layout
from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.owners import Owners, assign_owners
from zerofx.ir.parameters import ParameterInfo
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.program import WHOLE_STATES, StateSpec, StateTensor, WholeParameter
from zerofx.optimizers.whole import OwnedSizes, owners_of, planned_sizes
from zerofx.optimizers.whole.owned import shape_of
from zerofx.scheduler.plan.mesh import Mesh

Shape = tuple[int, ...]

_SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from(
    [(), (1,), (0, 3), (53,), (13, 7), (40, 9)]
)


def _layout(shapes: Sequence[Shape], num_ranks: int, compute_dtype: torch.dtype = torch.float32) -> BucketLayout:
    infos = [
        ParameterInfo(
            name=f"layers.{number // 4}.p{number}",
            aliases=(),
            shape=shape,
            stride=torch.empty(shape).stride(),
            dtype=torch.float32,
            compute_dtype=compute_dtype,
            requires_grad=True,
        )
        for number, shape in enumerate(shapes)
    ]
    names = [info.name for info in infos]
    units = [f"layers.{number}" for number in range(len(shapes))]
    first_use = {name: number for number, name in enumerate(names)}
    return make_layout(infos, dict.fromkeys(names, 0), units, first_use, Mesh(shard=num_ranks))


def _cost(_: Bucket, slot: Slot) -> float:
    return float(slot.numel**1.5)


def _loads(layout: BucketLayout, owners: dict[int, Owners], num_ranks: int) -> list[float]:
    return [
        sum(_cost(bucket, each.slot) for bucket in layout.buckets for each in owners[bucket.index].ranks[rank])
        for rank in range(num_ranks)
    ]


@settings(deadline=None)
@given(st.lists(_SHAPES, min_size=1, max_size=12), st.integers(2, 7), st.integers(1, 3))
def test_every_element_of_every_parameter_reaches_its_owner_once(
    shapes: list[Shape], num_ranks: int, stage: int
) -> None:
    layout = _layout(shapes, num_ranks)
    for bucket in layout.buckets:
        found = assign_owners(layout.buckets, stage, _cost)[bucket.index]
        full = torch.arange(bucket.numel)
        slices, owned = full.chunk(num_ranks), torch.full((num_ranks, found.numel), -1)
        for message in found.messages:
            into = owned[message.owner, message.in_owned : message.in_owned + message.numel]
            assert (into == -1).all(), "an element is sent twice"
            into.copy_(slices[message.slice_rank][message.in_slice : message.in_slice + message.numel])
        names = [each.slot.name for of_rank in found.ranks for each in of_rank]
        assert sorted(names) == sorted(slot.name for slot in bucket.slots)
        for rank, of_rank in enumerate(found.ranks):
            for each in of_rank:
                wanted = full[each.slot.offset : each.slot.offset + each.slot.numel]
                assert torch.equal(owned[rank, each.offset : each.offset + each.slot.numel], wanted)
                assert found.owner_of(each.slot.name) == rank and each.offset + each.num_taken <= found.numel
        assert (owned != -1).sum() == sum(slot.numel for slot in bucket.slots), "padding is not sent"


@settings(deadline=None)
@given(st.lists(_SHAPES, min_size=1, max_size=12), st.integers(2, 7))
def test_what_no_message_is_of_is_the_gaps_of_a_slice(shapes: list[Shape], num_ranks: int) -> None:
    layout = _layout(shapes, num_ranks)
    for index, found in assign_owners(layout.buckets, 3, _cost).items():
        bucket = layout.buckets[index]
        for rank in range(num_ranks):
            covered = torch.zeros(bucket.part_numel, dtype=torch.int64)
            for message in found.messages:
                if message.slice_rank == rank:
                    covered[message.in_slice : message.in_slice + message.numel] += 1
            for start, end in found.gaps(rank, bucket.part_numel):
                assert start < end
                covered[start:end] += 1
            assert (covered == 1).all()


@settings(deadline=None)
@given(st.lists(_SHAPES, min_size=1, max_size=20), st.integers(2, 7))
def test_no_rank_has_more_to_do_than_its_share_and_one_parameter(shapes: list[Shape], num_ranks: int) -> None:
    layout = _layout(shapes, num_ranks)
    owners = assign_owners(layout.buckets, 3, _cost)
    costs = [_cost(bucket, slot) for bucket in layout.buckets for slot in bucket.slots]
    # Graham, 1966: what is given to whoever has least to do.
    bound = sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs)
    assert max(_loads(layout, owners, num_ranks)) <= bound * (1 + 1e-9)
    assert assign_owners(layout.buckets, 3, _cost) == owners


@settings(deadline=None, max_examples=30)
@given(st.lists(_SHAPES, min_size=1, max_size=6), st.integers(2, 3))
def test_of_one_bucket_the_costliest_rank_has_at_most_four_thirds_of_the_least_possible(
    shapes: list[Shape], num_ranks: int
) -> None:
    layout = _layout(shapes, num_ranks)
    for bucket in layout.buckets:
        (found,) = assign_owners([bucket], 3, _cost).values()
        costs = [_cost(bucket, slot) for slot in bucket.slots]
        least = min(
            max(sum(c for c, rank in zip(costs, ranks, strict=True) if rank == own) for own in range(num_ranks))
            for ranks in itertools.product(range(num_ranks), repeat=len(costs))
        )
        most = max(sum(_cost(bucket, each.slot) for each in of_rank) for of_rank in found.ranks)
        assert most <= (4 / 3 - 1 / (3 * num_ranks)) * least * (1 + 1e-9)


def test_equal_matrices_are_dealt_out_evenly() -> None:
    layout = _layout([(8, 8)] * 12, 3)
    owners = assign_owners(layout.buckets, 3, _cost)
    assert [sum(len(found.ranks[rank]) for found in owners.values()) for rank in range(3)] == [4, 4, 4]


def test_a_bucket_that_is_not_cut_has_one_owner_and_nothing_to_send() -> None:
    for layout, stage in ((_layout([(3, 5), (2,)], 4), 0), (_layout([(3, 5), (2,)], 1), 3)):
        for index, found in assign_owners(layout.buckets, stage, _cost).items():
            bucket = layout.buckets[index]
            assert found.messages == () and found.numel == bucket.numel
            assert [(each.slot, each.offset) for each in found.ranks[0]] == [(s, s.offset) for s in bucket.slots]


def _program(layout: BucketLayout) -> UpdateProgram:
    """An update that keeps of each parameter as much as it has elements, and a row."""
    shapes = {shape_of(slot) for bucket in layout.buckets for slot in bucket.slots}
    whole = tuple(
        WholeParameter(
            shape,
            (
                StateTensor("mean", shape, torch.empty(shape).stride(), torch.float32),
                StateTensor("row", shape[:1], (1,) * len(shape[:1]), torch.float32),
            ),
            int(max(1, torch.Size(shape).numel()) ** 1.5),
            torch.float32,
            0,
        )
        for shape in shapes
    )
    states = (StateSpec(WHOLE_STATES, torch.uint8, 0.0),)
    return UpdateProgram("Whole", states, (), torch.fx.Graph(), (), torch.float32, fused=False, whole=whole)


@settings(deadline=None, max_examples=40)
@given(st.lists(_SHAPES, min_size=1, max_size=16), st.integers(2, 6), st.sets(st.integers(0, 3)))
def test_what_is_planned_to_rest_on_the_device_is_what_the_fullest_rank_keeps(
    shapes: list[Shape], num_ranks: int, away: set[int]
) -> None:
    layout = _layout(shapes, num_ranks, compute_dtype=torch.bfloat16)
    programs = dict.fromkeys(range(len(layout.buckets)), _program(layout))
    owners = owners_of(layout, programs, 3)
    planned = planned_sizes(layout, programs, owners, away)

    def num_bytes(sizes: OwnedSizes) -> int:
        assert sizes.has_master
        return 4 * sizes.numel + sizes.state_bytes

    kept = [
        {i: num_bytes(OwnedSizes.of(layout.buckets[i], programs[i], owners[i], rank)) for i in owners}
        for rank in range(num_ranks)
    ]
    here = [i for i in owners if i not in away]
    assert sum(num_bytes(planned[i]) for i in here) == max(sum(of[i] for i in here) for of in kept)
    assert all(num_bytes(planned[i]) >= max(of[i] for of in kept) for i in owners if i in away)
    for found in owners.values():
        elements = sum(each.num_taken for of_rank in found.ranks for each in of_rank)
        assert sum(found.numels) == elements and found.numel == max(found.numels)
        apart = [m for m in found.messages if m.owner != m.slice_rank]
        assert found.num_moved == sum(m.numel for m in apart)
