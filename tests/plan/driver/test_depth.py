"""Identical layers are planned and compiled once: a deeper model has no more distinct regions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpt import GPT
from tests.lib.models import adamw
from zerofx.driver.plan_only import plan

VOCAB = 11


@dataclass(frozen=True)
class _Regions:
    distinct: int
    all: int


def _regions(depth: int, stage: int, world_size: int) -> _Regions:
    with torch.device("meta"):
        model = GPT(vocab=VOCAB, dim=8, depth=depth, heads=2, block=4)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    planned = plan(model, adamw(model), (ids, ids), stage, world_size=world_size)
    return _Regions(planned.num_distinct_regions, planned.lowered.num_regions)


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [(0, 1), (3, 2), *(pytest.param(s, w, marks=pytest.mark.slow) for s, w in ((0, 2), (1, 2), (2, 2), (3, 64)))],
)
def test_distinct_regions_do_not_grow_with_depth(stage: int, world_size: int) -> None:
    shallow, deep = _regions(4, stage, world_size), _regions(12, stage, world_size)
    assert deep.distinct == shallow.distinct
    assert deep.all > 2 * shallow.all


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_24_layers_have_the_distinct_regions_of_4(stage: int) -> None:
    assert _regions(24, stage, 2).distinct == _regions(4, stage, 2).distinct
