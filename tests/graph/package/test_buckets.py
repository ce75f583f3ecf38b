"""Flat buckets: whatever is put into them, parameters keep their places and ranks hold equal slices."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.ir.bucketing import make_layout
from zerofx.ir.buckets import ALIGNMENT_BYTES, Bucket, BucketLayout
from zerofx.ir.parameters import ParameterInfo
from zerofx.scheduler.plan.facts import unit_of
from zerofx.scheduler.plan.mesh import Mesh

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.sampled_from([(), (1,), (0,), (3, 0), (53,), (13, 7)])
_UNITS = ("layers.0", "layers.1", "h.blocks.2")


def _stride(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in `order`."""
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[ParameterInfo], dict[str, int], BucketLayout]:
    infos = []
    for number in range(draw(st.integers(1, 12))):
        shape = draw(_SHAPES)
        dtype = draw(st.sampled_from(_DTYPES))
        infos.append(
            ParameterInfo(
                name=f"{draw(st.sampled_from((*_UNITS, 'embed', 'head.inner')))}.p{number}",
                aliases=(),
                shape=shape,
                stride=_stride(shape, draw(st.permutations(range(len(shape))))),
                dtype=dtype,
                compute_dtype=draw(st.sampled_from((dtype, torch.bfloat16))),
                requires_grad=True,
            )
        )
    groups = {info.name: draw(st.integers(0, 2)) for info in infos if draw(st.booleans())}
    used = draw(st.permutations([info.name for info in infos if draw(st.booleans())]))
    first_use = {name: position for position, name in enumerate(used)}
    return infos, groups, make_layout(infos, groups, _UNITS, first_use, Mesh(shard=draw(st.integers(1, 9))))


def _aligned(bucket: Bucket, offset: int) -> bool:
    return offset * bucket.compute_dtype.itemsize % ALIGNMENT_BYTES == 0


@settings(deadline=None)
@given(_layouts())
def test_slots_are_disjoint_aligned_and_in_the_models_order(
    drawn: tuple[list[ParameterInfo], dict[str, int], BucketLayout],
) -> None:
    infos, _, layout = drawn
    order = {info.name: i for i, info in enumerate(infos)}
    for bucket in layout.buckets:
        assert [order[s.name] for s in bucket.slots] == sorted(order[s.name] for s in bucket.slots)
        assert all(_aligned(bucket, slot.offset) for slot in bucket.slots)
        for slot, following in itertools.pairwise(bucket.slots):
            assert slot.offset + slot.numel <= following.offset
        assert bucket.slots[-1].offset + bucket.slots[-1].numel <= bucket.numel


@settings(deadline=None)
@given(_layouts())
def test_every_parameter_has_one_slot_in_a_bucket_of_its_kind(
    drawn: tuple[list[ParameterInfo], dict[str, int], BucketLayout],
) -> None:
    infos, groups, layout = drawn
    names = [slot.name for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(names) == sorted(info.name for info in infos)
    for info in infos:
        bucket, slot = layout.slot_of(info.name)
        assert (slot.shape, slot.numel) == (info.shape, math.prod(info.shape))
        assert (bucket.dtype, bucket.compute_dtype) == (info.dtype, info.compute_dtype)
        assert bucket.group == groups.get(info.name)
        unit = unit_of(info.name, _UNITS)
        assert bucket.unit == unit if unit else bucket.unit.startswith("loose.")
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))


@settings(deadline=None)
@given(_layouts())
def test_slices_are_equal_aligned_never_empty_and_no_longer_than_they_must_be(
    drawn: tuple[list[ParameterInfo], dict[str, int], BucketLayout],
) -> None:
    _, _, layout = drawn
    for bucket in layout.buckets:
        assert bucket.numel == bucket.shard_numel * layout.num_ranks > 0
        assert _aligned(bucket, bucket.shard_numel)
        align = ALIGNMENT_BYTES // bucket.compute_dtype.itemsize
        largest = bucket.num_parameters + len(bucket.slots) * (align - 1) + layout.num_ranks * align
        assert bucket.num_parameters <= bucket.numel <= largest


@settings(deadline=None)
@given(_layouts())
def test_padding_and_slots_cover_a_bucket_once(
    drawn: tuple[list[ParameterInfo], dict[str, int], BucketLayout],
) -> None:
    _, _, layout = drawn
    for bucket in layout.buckets:
        covered = torch.zeros(bucket.numel, dtype=torch.int)
        for start, end in bucket.padding():
            assert start < end
            covered[start:end] += 1
        for slot in bucket.slots:
            slot.view(covered).add_(1)
        assert torch.equal(covered, torch.ones_like(covered))


@settings(deadline=None)
@given(_layouts())
def test_a_view_keeps_the_parameters_own_order_in_memory(
    drawn: tuple[list[ParameterInfo], dict[str, int], BucketLayout],
) -> None:
    infos, _, layout = drawn
    for info in infos:
        bucket, slot = layout.slot_of(info.name)
        view = slot.view(torch.arange(bucket.numel))
        assert view.shape == info.shape
        if info.numel:
            strides = [(s, size) for s, size in zip(info.stride, info.shape, strict=True) if size != 1]
            assert [(s, size) for s, size in zip(view.stride(), view.shape, strict=True) if size != 1] == strides
            assert sorted(view.flatten().tolist()) == list(range(slot.offset, slot.offset + slot.numel))


def test_parameters_outside_units_share_a_bucket_when_they_are_used_together() -> None:
    names = ["embed.weight", "embed.positions", "layers.0.w", "layers.1.w", "norm.weight", "head.weight"]
    infos = [ParameterInfo(n, (n,), (4,), (1,), torch.float32, torch.float32, True) for n in names]
    layout = make_layout(
        infos, dict.fromkeys(names, 0), ("layers.0", "layers.1"), {n: i for i, n in enumerate(names)}, Mesh(shard=2)
    )
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [
        ["embed.weight", "embed.positions"], ["layers.0.w"], ["layers.1.w"], ["norm.weight", "head.weight"],
    ]  # fmt: skip
    assert [bucket.name for bucket in layout.buckets] == ["embed", "layers.0", "layers.1", "norm+head"]


def test_what_is_never_used_comes_last_however_long_the_graph_is() -> None:
    unused, used = (
        ParameterInfo(name, (), (4,), (1,), torch.float32, torch.float32, requires_grad=True)
        for name in ("head.weight", "layers.0.weight")
    )
    layout = make_layout([unused, used], {}, ("layers.0",), {used.name: 20_000}, Mesh(shard=2))
    assert [bucket.name for bucket in layout.buckets] == ["layers.0", "head"]
