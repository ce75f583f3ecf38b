"""Weights that products read in fp8 are gathered so: with the bits of torchao's layers, and fewer bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.fp8 import (
    RECIPES,
    batches,
    build,
    compile_in_fp8,
    fast_in_fp8,
    loss_of,
    optimizer_of,
    unlike_torchao,
)
from tests.lib.runs.training import world
from zerofx.choices import Fp8Recipe
from zerofx.scheduler.cost.machine import Link

# Links on which a byte takes longer than all that a step computes.
SLOW = dataclasses.replace(fast_in_fp8(), intra_node=Link(bandwidth=1.0, latency=1e-6))
RUNS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "two micro-batches": {"stage": 3, "accumulate": 2, "reduce": "once"},
    "computed again": {"stage": 3, "recompute": "full"},
    "nothing ahead": {"stage": 3, "prefetch": 0},
}
ON_THE_HOST = {"stage": 3, "offload": "host", "memory_budget": "least", "tile": "none"}  # what is there, as it is


def _planned(kind: str, recipe: Fp8Recipe, options: dict[str, Any], num_ranks: int) -> zerofx.Plan:
    args, kwargs = next(batches(kind, 0, 1))
    model, low = build(kind), zerofx.Precision(fp8=recipe)
    given: dict[str, Any] = {"machine": SLOW, "backend": "eager", "precision": low, "world_size": num_ranks, **options}
    plan: zerofx.Plan = zerofx.plan(model, optimizer_of(model), kwargs or args, **given).plan
    return plan


def _unlike(kind: str, recipe: Fp8Recipe) -> dict[str, list[str]]:
    every = {**RUNS, "on the host": ON_THE_HOST}
    runs = {label: {"machine": SLOW, **options} for label, options in every.items()}
    return unlike_torchao(kind, recipe, runs)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_layers_of_torchao(recipe: Fp8Recipe, kind: str, num_ranks: int) -> None:
    pytest.importorskip("torchao", reason="its layers with products in fp8 are trained, where it is installed")
    for label, options in RUNS.items():
        assert _planned(kind, recipe, options, num_ranks).has_casts, label
    for rank, wrong in enumerate(run_ranks(_unlike, num_ranks, kind, recipe)):
        assert wrong == {}, f"rank {rank}"


@dataclass(frozen=True)
class Counts:
    """Of a step whose weights are gathered in fp8, and of one whose are not: bytes sent and at the peak, as planned and
    as counted. ``less``: elements of a rank's slices that the first sends in a byte each."""

    wire: tuple[tuple[int, int], tuple[int, int]]
    peak: tuple[tuple[int, int], tuple[int, int]]
    less: int


def _count(recipe: Fp8Recipe) -> Counts:
    args = [tensor.clone() for tensor in next(batches("gpt", world()[0], 1))[0]]
    wire, peak, less = [], [], 0
    for machine in (SLOW, fast_in_fp8()):
        step = compile_in_fp8("gpt", recipe, build("gpt"), stage=3, machine=machine)
        step(*args)
        measured, plan = step.measure(*args), step.plan
        wire.append((plan.wire_bytes, measured.wire_bytes))
        peak.append((plan.peak_bytes["device"], measured.peak_bytes["device"]))
        assert plan.has_casts == (machine is SLOW)
        if plan.has_casts:
            assert "runtime.fp8_slice_cast(" in step.source
            less = sum(plan.buckets[gather.bucket].shard_numel for gather in plan.gathers if gather.in_fp8)
        step.close()
    return Counts((wire[0], wire[1]), (peak[0], peak[1]), less)


@pytest.mark.days(3)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_sent_is_a_byte_for_each_element_less_as_counted_at_the_transport(recipe: Fp8Recipe) -> None:
    for counts in run_ranks(_count, 2, recipe):
        (low, exact), (low_peak, exact_peak) = counts.wire, counts.peak
        assert low[0] == low[1] and exact[0] == exact[1]
        assert low_peak[0] == low_peak[1] and exact_peak[0] == exact_peak[1]
        scales = low[1] - (exact[1] - counts.less)  # what ranks tell each other of largest magnitudes, and padding
        assert 0 < scales < 0.1 * low[1]


def _go_on(folder: str) -> list[list[float]]:
    """Losses of steps that plan for themselves, are given a plan, and have evaluated and seen other shapes."""
    rank, found = world()[0], list[list[float]]()
    first = next(batches("gpt", rank, 1))[0]
    plan: Any = None
    for _ in range(2):
        step = compile_in_fp8("gpt", "rowwise", build("gpt"), stage=3, machine=SLOW, plan=plan)
        losses = [float(step(*first))]
        plan = step.plan
        assert plan.has_casts
        found.append(losses)
        step.save_checkpoint(folder)
        losses.append(float(loss_of(step.evaluate(*first))))
        if len(found) == 1:
            losses.append(float(step(*next(batches("gpt", rank, 1, 2))[0])))
            assert step.plan.has_casts
        step.close()
    plain = compile_in_fp8("gpt", "rowwise", build("gpt"), stage=3)
    found.append([float(plain(*first)), float(loss_of(plain.evaluate(*first)))])
    found[-1].append(float(plain(*next(batches("gpt", rank, 1, 2))[0])))
    plain.load_checkpoint(folder)
    found.append([float(loss_of(plain.evaluate(*first)))])
    plain.close()
    return found


@pytest.mark.days(3)
@pytest.mark.filterwarnings("ignore:a batch of another shape:zerofx.ZeroFXNotice")
def test_plans_that_are_given_evaluations_other_shapes_and_checkpoints_go_with_it(tmp_path: Any) -> None:
    for own, given, plain, loaded in run_ranks(_go_on, 2, str(tmp_path / "saved")):
        assert own == plain
        assert given == plain[:2]
        assert loaded == plain[1:2]


def test_what_computation_hides_is_gathered_as_it_is() -> None:
    assert not _planned("gpt", "rowwise", {"stage": 3, "machine": fast_in_fp8()}, 2).has_casts
    assert not _planned("gpt", "rowwise", {"stage": 2}, 2).has_casts
    assert not _planned("gpt", "rowwise", {"stage": 3}, 1).has_casts


def test_a_plan_says_what_is_gathered_so_and_is_read_again() -> None:
    plan = _planned("gpt", "tensorwise", {"stage": 3}, 2)
    assert zerofx.Plan.from_json(plan.to_json()) == plan
    assert "casts to fp8: " in plan.why("layers.0") and "less for a step, which gathers " in str(plan)


@pytest.mark.slow
def test_on_a_mesh_the_bits_are_those_without() -> None:
    assert all(losses[0] == losses[1] for losses in run_ranks(_on_mesh, 4, {"replicate": 2, "shard": 2}))


def _on_mesh(mesh: dict[str, int]) -> list[list[float]]:
    losses = []
    for machine in (SLOW, fast_in_fp8()):
        step = compile_in_fp8("llama", "tensorwise", build("llama"), stage=3, machine=machine, mesh=mesh)
        losses.append([float(loss_of(step(**kwargs))) for _, kwargs in batches("llama", world()[0], 3)])
        assert step.plan.has_casts == (machine is SLOW)
        step.close()
    return losses
