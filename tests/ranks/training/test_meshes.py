"""Ranks along several axes: every stage gives the same bits, those of one process but for the order of sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.offloads import check_measured
from tests.lib.training import (
    Trained,
    differences,
    step_of,
    train_compiled,
    train_plain,
    without_key_biases,
    world,
)
from zerofx import Machine

HYBRID = {"replicate": 2, "shard": 2}
RUNS: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}


def _compared(names: list[str], mesh: dict[str, int], runs: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """What is unlike DistributedDataParallel, and what unlike the first of the runs to the bit, by case and run."""
    wrong: dict[str, list[str]] = {}
    for name in names:
        expected, first = without_key_biases(train_plain(CASES[name], steps)), list[Trained]()
        for label, options in runs.items():
            trained = train_compiled(CASES[name], steps=steps, mesh=mesh, **options)
            first = first or [trained]
            wrong[f"{name}, {label}, far off"] = differences(expected, without_key_biases(trained), 1e-5)
            wrong[f"{name}, {label}, another bit"] = differences(first[0], trained)
    return {what: lines for what, lines in wrong.items() if lines}


@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2}], ids=str)
def test_two_ranks(mesh: dict[str, int]) -> None:
    for rank, wrong in enumerate(run_ranks(_compared, 2, ["gpt", "mixed dtypes"], mesh, RUNS, 3)):
        assert wrong == {}, f"rank {rank}"


def test_four_ranks_along_two_axes() -> None:
    for rank, wrong in enumerate(run_ranks(_compared, 4, ["gpt", "tied", "buffers", "frozen"], HYBRID, RUNS, 3)):
        assert wrong == {}, f"rank {rank}"


WAYS: dict[str, dict[str, Any]] = {
    "nothing issued ahead": {"prefetch": 0},
    "bf16": {"precision": "bf16"},
    "clipped": {"max_grad_norm": 0.5},
    "micro-batches": {"accumulate": 2, "reduce": "once"},
    "each micro-batch reduced": {"accumulate": 2, "reduce": "each"},
    "four micro-batches in bf16": {"accumulate": 4, "reduce": "each", "precision": "bf16"},
    "delayed": {"delayed_update": 1},
}


def _ways() -> dict[str, list[str]]:
    """What is unlike the same on one axis, beyond the order of sums, and what stages have other bits, by way."""
    wrong = {}
    for name, options in WAYS.items():
        rounding = 5e-2 if "precision" in options else 1e-5
        one_axis = train_compiled(CASES["stack"], 3, steps=3, **options)
        first, last = (train_compiled(CASES["stack"], stage, steps=3, mesh=HYBRID, **options) for stage in (1, 3))
        wrong[f"{name}, far off"] = differences(one_axis, last, rounding)
        wrong[f"{name}, another bit"] = differences(first, last)
    return {what: lines for what, lines in wrong.items() if lines}


def test_micro_batches_clipping_precision_and_delay() -> None:
    for rank, wrong in enumerate(run_ranks(_ways, 4)):
        assert wrong == {}, f"rank {rank}"


def _sent(stage: int) -> dict[str, Any]:
    """Bytes that this rank sends in a step to ranks of its shard group and to its replicas, and what its plan says."""
    machine = replace(Machine.named("cpu"), ranks_per_node=2)  # a node is a shard group
    step, args = step_of("stack", stage, mesh=HYBRID, machine=machine)
    step(*args)
    assert step._steps.taken is not None
    runtime, rank = step._steps.taken.runtime, world()[0]
    before = runtime.sent_to
    step(*args)
    sent = {peer: number - before.get(peer, 0) for peer, number in runtime.sent_to.items()}
    check_measured(step.measure(*args, num_steps=2), step.plan, 4096, share=0.001)
    mesh, buckets = step.plan.mesh, step._steps.taken.layout.buckets
    inner, outer = (set(mesh.members(rank, axes)) - {rank} for axes in (("shard",), ("replicate",)))
    gathers = [gather.bucket for gather in step.plan.gathers]
    found = {
        "within": sum(sent.get(peer, 0) for peer in inner),
        "across": sum(sent.get(peer, 0) for peer in outer),
        "elsewhere": sum(number for peer, number in sent.items() if peer not in inner | outer),
        "planned": step.plan.node_wire_bytes,
        "slices": sum(bucket.shard_bytes for bucket in buckets),
        "gathered": sum(buckets[index].shard_bytes for index in gathers),
        "states": [bucket.part_numel for bucket in buckets],
    }
    step.close()
    return found


def _counts() -> list[dict[str, Any]]:
    return [_sent(stage) for stage in range(4)]


def test_bytes_by_link_are_those_of_theory_of_the_plan_and_of_the_transport() -> None:
    for stages in run_ranks(_counts, 4):
        for stage, found in enumerate(stages):
            assert found["planned"] == {"within": 2 * found["within"], "across": 2 * found["across"]}, stage
            # S = R = 2: each hop moves (n - 1) / n of what it is over, and an all-reduce is two of them.
            reduced = found["slices"]
            gathered = found["gathered"] if stage == 3 else found["slices"]
            assert found["within"] == reduced + gathered, stage
            assert found["across"] == 2 * (found["slices"] // 2), stage
            assert found["elsewhere"] == 0
