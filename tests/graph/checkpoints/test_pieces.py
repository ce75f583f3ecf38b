"""The boxes of parameters that slices of buckets are made of, in whatever parts these lie."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.checkpoints.pieces import pieces_of
from zerofx.disk.checkpoint.boxes import Box
from zerofx.ir.bucketing import make_layout
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.state.weights import whole_bucket
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import Sharded


@st.composite
def _meshes(draw: st.DrawFn) -> Mesh:
    return Mesh(*(draw(st.integers(1, 3)) for _ in range(3)))


@st.composite
def _parameters(draw: st.DrawFn, num_parts: int) -> tuple[ParameterInfo, torch.Tensor]:
    """What lies in a bucket, whole or in parts of groups, its dimensions in any order; and the model's own tensor.

    Some are rows of a longer one.
    """
    shape, part = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 3)))], None
    if shape and num_parts > 1 and draw(st.booleans()):
        part = Sharded(draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3)))
        shape[part.dim] *= part.groups
    stride, step = [0] * len(shape), 1
    for dim in draw(st.permutations(list(range(len(shape))))):
        stride[dim], step = step, step * shape[dim]
    name = f"p{draw(st.integers(0, 10**6))}"
    first_row = draw(st.integers(0, 2)) if len(shape) > 0 and draw(st.booleans()) else None
    info = ParameterInfo(
        name, (name,), tuple(shape), tuple(stride), torch.float64, torch.float64, requires_grad=True,
        whole=None if first_row is None else f"{name} whole", first_row=first_row or 0, part=part,
        num_parts=num_parts if part is not None else 1,
    )  # fmt: skip
    if part is not None:
        shape[part.dim] *= num_parts
    if first_row is not None:
        shape[0] += first_row + 1  # of which the last and the first are no part of it
    return info, torch.rand(shape, dtype=torch.float64)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_what_ranks_own_are_boxes_of_the_models_parameters_each_element_once(data: st.DataObject) -> None:
    mesh = data.draw(_meshes())
    drawn = data.draw(st.lists(_parameters(mesh.model), min_size=1, max_size=4, unique_by=lambda pair: pair[0].name))
    tensors = {info.source: whole for info, whole in drawn}
    layout = make_layout([info for info, _ in drawn], {}, (), {}, mesh)
    counts = {info.source: torch.zeros_like(whole) for info, whole in drawn}
    for rank in range(mesh.num_ranks):
        for bucket in layout.local_to(rank).buckets:
            flat = whole_bucket(bucket, tensors, torch.device("cpu"))
            first, last = bucket.saved_range(rank)
            for piece in pieces_of(bucket, first, last):
                whole = tensors[piece.source]
                assert first <= piece.start < piece.end <= last
                assert torch.equal(piece.view(flat[first:last], first), piece.box.select(whole, Box.whole(whole.shape)))
                piece.box.select(counts[piece.source], Box.whole(whole.shape)).add_(1)
    for info, whole in drawn:
        expected = torch.zeros_like(whole)
        rows = whole.shape[0] - info.first_row - 1 if info.whole is not None else None
        (expected if rows is None else expected.narrow(0, info.first_row, rows)).fill_(1)
        assert torch.equal(counts[info.source], expected), info


def test_a_part_of_groups_is_a_box_for_each() -> None:
    """Columns of queries, keys and values: not one for each row."""
    info = ParameterInfo(
        "qkv", ("qkv",), (64, 24), (24, 1), torch.float32, torch.float32, requires_grad=True, part=Sharded(1, 3),
        num_parts=2,
    )  # fmt: skip
    (bucket,) = make_layout([info], {}, (), {}, Mesh(model=2)).local_to(1).buckets
    boxes = [piece.box for piece in pieces_of(bucket, 0, bucket.numel)]
    assert boxes == [Box((0, 8), (64, 8)), Box((0, 24), (64, 8)), Box((0, 40), (64, 8))]
    assert math.prod(info.shape) == sum(box.numel for box in boxes)
