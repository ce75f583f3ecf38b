"""Steps that read models that other steps train, on several ranks: a bucket at a time, with eager mode's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.adversarial import (
    Stack,
    batches,
    discriminator_step,
    generator_loss,
    generator_step,
    models,
    optimizer_of,
    steps_of,
    unlike_eager_mode,
    unlike_eager_mode_with_slices,
)
from tests.lib.runs.sharing import SHARING
from zerofx import UsageError


def _wrong(runs: list[tuple[tuple[int, int], dict[str, Any]]]) -> list[str]:
    return [
        f"stages {stages}, { {name: option for name, option in options.items() if name != 'machine'} }: {text}"
        for stages, options in runs
        for text in unlike_eager_mode(3, stages, **options)
    ]


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ((0, 0), {}),
        ((3, 3), {}),
        ((0, 3), {"prefetch": 0}),
        ((3, 1), {}),
        ((0, 0), {"precisions": ("bf16", None)}),
        ((3, 3), {"precisions": (None, "bf16")}),
        ((3, 3), {"precisions": ("bf16", None)}),
        ((1, 3), {"away": {"offload": "host", "memory_budget": 36_000}}),
    ],
    ids=str,
)
def test_the_bits_of_eager_mode(stages: tuple[int, int], options: dict[str, Any]) -> None:
    for rank, wrong in enumerate(run_ranks(_wrong, 2, [(stages, options)])):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
def test_every_pair_of_stages_and_replicas() -> None:
    mesh = {"replicate": 2, "shard": 2}
    runs = [((a, b), {"mesh": mesh}) for a, b in ((0, 0), (3, 3), (1, 3), (3, 2))]
    for rank, wrong in enumerate(run_ranks(_wrong, 4, runs)):
        assert wrong == [], f"rank {rank}"


def _within_budget() -> list[str]:
    """What is wrong with a step whose budget does not hold the model that it reads whole."""
    torch.manual_seed(0)
    generator, discriminator = Stack(4, 2, depth=1), Stack(2, 1, depth=12, dim=64)
    whole = sum(parameter.nbytes for parameter in discriminator.parameters())
    held = 3 * whole // 2  # this rank's half of parameters and of two states each
    other = discriminator_step(discriminator, generator)
    step = generator_step(generator, discriminator, memory_budget=held + whole // 2)
    for real, noise in batches(2):
        other(real, noise)
        step(noise)
    plan, measured = step.plan, step.measure(noise, num_steps=1).peak_bytes["device"]
    wrong = [] if held < measured == plan.peak_bytes["device"] else [f"{measured} bytes are taken"]
    gathered = [plan.buckets[gather.bucket].name for gather in plan.gathers]
    wrong += [] if gathered.count("discriminator.layers.7") == 2 else [f"{gathered} are gathered"]
    with step.full_parameters(), other.full_parameters():
        expected = generator_loss(generator, discriminator, noise)
    return wrong + ([] if torch.equal(step.evaluate(noise), expected) else ["an evaluation gives another loss"])


@pytest.mark.days(3)
def test_what_is_read_is_gathered_a_bucket_at_a_time() -> None:
    for rank, wrong in enumerate(run_ranks(_within_budget, 2)):
        assert wrong == [], f"rank {rank}"


def _other_values() -> list[bool]:
    """Whether ranks read rank 0's values of a model that no step has taken over yet."""
    generator, discriminator = models()
    torch.manual_seed(torch.distributed.get_rank())
    torch.nn.init.normal_(generator.last.weight)
    step, other = steps_of(generator, discriminator)
    ((real, noise),) = batches(1)
    other(real, noise)
    early = generator.last.weight.detach().clone()
    step.prepare(noise)
    return [torch.equal(early, step.full_state_dict()["last.weight"])]


def test_ranks_read_the_values_that_training_begins_with() -> None:
    assert run_ranks(_other_values, 2) == [[True], [True]]


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("stages", "options"),
    [((0, 0), {}), ((3, 3), {}), ((1, 3), {"away": {"offload": "host", "memory_budget": 23_000}})],
    ids=str,
)
def test_what_is_read_lies_in_parts_where_ranks_share_computations(
    stages: tuple[int, int], options: dict[str, Any]
) -> None:
    runs = [(stages, {"mesh": {"model": 2}, "machine": SHARING, **options})]
    for rank, wrong in enumerate(run_ranks(_wrong, 2, runs)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
def test_slices_of_parts_are_read_on_meshes_of_two_axes() -> None:
    meshes: list[dict[str, int]] = [{"shard": 2, "model": 2}, {"replicate": 2, "model": 2}]
    runs = [((a, b), {"mesh": mesh, "machine": SHARING}) for mesh in meshes for a, b in ((0, 0), (3, 3), (1, 3))]
    for rank, wrong in enumerate(run_ranks(_wrong, 4, runs)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stages", [(0, 0), (3, 3)], ids=str)
def test_slices_of_slices_are_read(stages: tuple[int, int]) -> None:
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode_with_slices, 2, 3, stages)):
        assert wrong == [], f"rank {rank}"


def _of_many_layers() -> tuple[Tensor, Tensor]:
    """What an evaluation gives, and eager mode, where layouts within a budget were simulated with fewer layers."""
    generator, discriminator = models(depth=6)  # the fewest that are simulated with four and five of them
    step, other = steps_of(generator, discriminator, mesh={"model": 2}, machine=SHARING, memory_budget=150_000)
    for real, noise in batches(2, sharing=2):
        other(real, noise)
        step(noise)
    with step.full_parameters(), other.full_parameters():
        expected = generator_loss(generator, discriminator, noise)
    return step.evaluate(noise), expected


@pytest.mark.days(3)
def test_a_layout_for_a_budget_is_looked_for_with_fewer_layers_of_what_is_read() -> None:
    for loss, expected in run_ranks(_of_many_layers, 2):
        torch.testing.assert_close(loss, expected)


def _meshes() -> str:
    """What steps are told whose models lie on other meshes."""
    real, noise = torch.ones(4, 2), torch.ones(4, 4)
    generator, discriminator = models()
    other = zerofx.compile(
        discriminator, optimizer_of(discriminator), backend="eager", mesh={"replicate": 2},
        forward=lambda model, real: model(real).sum(),
    )  # fmt: skip
    other(real)
    with pytest.raises(UsageError) as refusal:
        generator_step(generator, discriminator, mesh={"shard": 2})(noise)
    other.close()
    return str(refusal.value)


def test_steps_that_read_one_another_are_on_one_mesh() -> None:
    for another in run_ranks(_meshes, 2):
        assert "compile both with the same mesh" in another
