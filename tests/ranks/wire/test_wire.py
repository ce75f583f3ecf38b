"""What a step sends and holds: counted, and compared with its plan and the formulas of ZeRO (1910.02054)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, DIM, ROWS, Stack, adamw, batches
from tests.lib.runs.training import build, world
from zerofx.runtime.state.bucket_state import BucketState

LAYERS = 4


@dataclass(frozen=True)
class Count:
    """Bytes of one step on one rank."""

    sent: int
    planned_sent: int
    held: int
    planned_states: int
    padded: int  # elements of all buckets, padding included
    largest_padding: int  # elements
    parameters: int
    full_bytes: dict[str, int]  # of each bucket
    gathers: list[str]  # bucket names, in order


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(world()[0])
    return torch.randn(ROWS, DIM, generator=generator), torch.randn(ROWS, DIM, generator=generator)


def _count(stage: int, options: dict[str, Any], name: str = "") -> Count:
    torch.manual_seed(0)
    model = build(CASES[name]) if name else Stack(LAYERS)
    step = zerofx.compile(model, adamw(model), stage, backend="eager", **options)
    args, kwargs = next(batches(CASES[name], world()[0], 1)) if name else (_batch(), {})
    step(*args, **kwargs)
    assert step._steps.taken is not None
    transport = step._steps.taken.state._transport
    assert transport is not None
    before = transport.sent_bytes
    step(*args, **kwargs)
    layout = step._steps.taken.state.layout
    align = 64 // layout.buckets[0].compute_dtype.itemsize
    return Count(
        sent=transport.sent_bytes - before,
        planned_sent=step.plan.wire_bytes,
        held=sum(map(_held, step._steps.taken.state.buckets)),
        planned_states=step.plan.model_state_bytes,
        padded=sum(bucket.numel for bucket in layout.buckets),
        largest_padding=sum((len(b.slots) + layout.num_ranks) * align for b in layout.buckets),
        parameters=sum(p.numel() for p in model.parameters()),
        full_bytes={bucket.name: bucket.full_bytes for bucket in layout.buckets},
        gathers=[layout.buckets[g.bucket].name for g in step.plan.gathers],
    )


def _held(bucket: BucketState) -> int:
    tensors = [
        t for t in (bucket.full, bucket.shard, bucket.master, *bucket.flat.values()) if isinstance(t, torch.Tensor)
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True)
class Counts:
    """Everything that is counted in one world, on one rank: by stage, by stage in bf16, and for some models."""

    stages: list[Count]
    bf16: list[Count]
    kept: Count
    models: dict[str, Count]


def _count_all(names: list[str]) -> Counts:
    return Counts(
        stages=[_count(stage, {}) for stage in range(4)],
        bf16=[_count(stage, {"precision": "bf16"}) for stage in range(4)],
        kept=_count(3, {"keep_gathered": "all"}),
        models={name: _count(3, {}, name) for name in names},
    )


@pytest.fixture(scope="module")
def two_ranks() -> list[Counts]:
    """Counts of a world of two, by rank."""
    return run_ranks(_count_all, 2, ["tied", "borrowed", "lora"])


@pytest.fixture(scope="module")
def three_ranks() -> list[Counts]:
    """Counts of a world of three, by rank."""
    return run_ranks(_count_all, 3, [])


@pytest.fixture(params=["two_ranks", pytest.param("three_ranks", marks=pytest.mark.slow)])
def counts(request: pytest.FixtureRequest) -> list[Counts]:
    """Counts by rank, of a world of two and of one of three."""
    found: list[Counts] = request.getfixturevalue(request.param)
    return found


@pytest.mark.days(3)
def test_bytes_sent_are_those_of_the_plan_and_of_theory(counts: list[Counts]) -> None:
    num_ranks = len(counts)
    for rank in counts:
        for stage, count in enumerate(rank.stages):
            assert count.sent == count.planned_sent
            psi = sum(count.full_bytes.values())
            expected = 2 * psi if stage < 3 else 3 * psi
            if stage == 3:
                # Nothing runs between the last layer's forward and its backward: one residency spans both.
                layers = [f"layers.{i}" for i in range(LAYERS)]
                assert count.gathers == [*layers, *layers[-2::-1]]
                expected -= count.full_bytes[layers[-1]]
            assert count.sent * num_ranks == expected * (num_ranks - 1)
            assert 4 * count.parameters <= psi <= 4 * (count.parameters + count.largest_padding)


def test_bf16_halves_what_is_sent(counts: list[Counts]) -> None:
    for rank in counts:
        for stage, (count, full) in enumerate(zip(rank.bf16, rank.stages, strict=True)):
            assert count.sent == count.planned_sent
            gathered = sum(count.full_bytes[name] for name in count.gathers) if stage == 3 else None
            psi = sum(count.full_bytes.values())
            assert psi == 2 * count.padded and sum(full.full_bytes.values()) == 4 * full.padded
            assert count.sent * len(counts) == (psi + (psi if gathered is None else gathered)) * (len(counts) - 1)


def test_kept_buckets_are_gathered_once(counts: list[Counts]) -> None:
    for rank in counts:
        assert len(rank.kept.gathers) == LAYERS
        assert rank.kept.sent * len(counts) == 2 * sum(rank.kept.full_bytes.values()) * (len(counts) - 1)


def test_every_residency_of_the_plan_is_one_gather_on_the_wire(two_ranks: list[Counts]) -> None:
    for rank in two_ranks:
        for name, count in rank.models.items():
            assert count.sent == count.planned_sent
            if name != "lora":  # its frozen buckets are not reduced
                gathered = sum(count.full_bytes[bucket] for bucket in count.gathers)
                assert count.sent * 2 == gathered + sum(count.full_bytes.values())
        # The embedding: once for the tokens, once for the head, whose forward and backward are one residency.
        assert rank.models["tied"].gathers.count("embed") == 2


def test_model_states_in_bf16_take_what_zero_says(counts: list[Counts]) -> None:
    n = len(counts)
    for rank in counts:
        for stage, count in enumerate(rank.bf16):
            psi = count.padded
            assert psi % n == 0 and count.parameters <= psi <= count.parameters + count.largest_padding
            expected = [16 * psi, 4 * psi + 12 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n][stage]
            assert count.planned_states == expected
            gradients = 2 * psi if stage < 2 else 2 * psi // n
            assert count.held == expected - gradients
