"""Slices of matrices that are cast to fp8 have the bits of the whole ones' casts, wherever they are cut."""

from __future__ import annotations

import math

import pytest
import torch

from zerofx.ir.buckets import Bucket, Slot
from zerofx.ir.op_kernels import fp8, fp8_slices
from zerofx.scheduler.plan.mesh import Mesh

SHAPES = [(7, 5), (3, 48), (1, 4), (16, 1)]


def _bucket(num_ranks: int) -> Bucket:
    slots, offset = [], 0
    for number, shape in enumerate(SHAPES):
        slots.append(Slot(f"w{number}", shape, (shape[1], 1), offset, math.prod(shape)))
        offset += math.prod(shape) + 3  # and padding
    low = torch.bfloat16
    each = -(-offset // num_ranks)
    return Bucket(0, "layer", "layer", 0, low, low, low, low, tuple(slots), each, Mesh(shard=num_ranks))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scaled", ["whole", "rows", "columns"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 16])
def test_casts_of_slices_are_slices_of_casts(
    num_ranks: int, scaled: fp8_slices.Scaled, power_of_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_slices, "_AT_A_TIME", 100)  # some rows of one, and less than one of another
    bucket = _bucket(num_ranks)
    torch.manual_seed(num_ranks)
    full = torch.zeros(bucket.numel, dtype=torch.bfloat16)
    for slot in bucket.slots:
        slot.view(full).copy_(torch.randn(slot.shape) * 10 ** torch.randn(slot.shape))
    shards = full.chunk(num_ranks)
    each = [fp8_slices.largest(shard, bucket, place, scaled) for place, shard in enumerate(shards)]
    scales = fp8.scale(torch.stack(each).amax(0), torch.float8_e4m3fn, 1, power_of_two)
    casts = [fp8_slices.cast(shard, scales, bucket, place, scaled) for place, shard in enumerate(shards)]
    whole = torch.cat(casts)
    dim = {"whole": None, "rows": 1, "columns": 0}[scaled]
    for slot in bucket.slots:
        own = fp8.scale(slot.view(full), torch.float8_e4m3fn, dim, power_of_two)
        first = fp8_slices.first_scale(bucket.slots, slot.name, scaled)
        assert torch.equal(scales[first : first + own.numel()].view(own.shape), own)
        expected = fp8.cast(slot.view(full), own, torch.float8_e4m3fn, by_columns=False)
        assert torch.equal(slot.view(whole).view(torch.uint8), expected.view(torch.uint8))


def test_what_is_not_a_number_makes_its_scale_none() -> None:
    bucket = _bucket(1)
    full = torch.ones(bucket.numel, dtype=torch.bfloat16)
    full[2] = float("nan")
    largest = fp8_slices.largest(full, bucket, 0, "whole")
    assert largest.isnan().tolist() == [[True], [False], [False], [False]]
