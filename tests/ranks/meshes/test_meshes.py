"""Ranks along several axes: every stage gives the same bits, those of one process but for the order of sums."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.lib.budgets import small_machine
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import check_measured, placing, prepare_case, same_tensors
from tests.lib.runs.training import (
    Trained,
    build,
    differences,
    step_of,
    train_compiled,
    train_plain,
    without_key_biases,
    world,
)
from zerofx import Machine, Mesh, UsageError

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


def _on_two(names: list[str]) -> dict[str, Any]:
    meshes = [{"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2}]
    return {f"{mesh}, {what}": lines for mesh in meshes for what, lines in _compared(names, mesh, RUNS, 3).items()}


@pytest.mark.parametrize("names", [["stack"], pytest.param(["gpt", "mixed dtypes"], marks=pytest.mark.slow)], ids=str)
def test_two_ranks_along_one_axis_or_the_other(names: list[str]) -> None:
    for rank, wrong in enumerate(run_ranks(_on_two, 2, names)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.slow
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
    "fp16": {"precision": "fp16"},
    "delayed": {"delayed_update": 1},
    "whole slices": {"states_over": "shard"},
    "whole slices, clipped": {"states_over": "shard", "max_grad_norm": 0.5},
    "whole slices, each micro-batch": {"states_over": "shard", "accumulate": 2, "reduce": "each"},
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


@pytest.mark.slow
def test_micro_batches_clipping_precision_delay_and_whole_slices() -> None:
    for rank, wrong in enumerate(run_ranks(_ways, 4)):
        assert wrong == {}, f"rank {rank}"


def _num_sockets() -> int:
    """Connections of this process, on systems that list them."""
    folder = Path("/proc/self/fd")
    return sum("socket:[" in os.path.realpath(path) for path in folder.iterdir()) if folder.is_dir() else 0


def _connections() -> list[int]:
    """Connections before a step on one axis, with it, and after it is closed; then the same on two axes."""
    counts = []
    for options in ({}, {"mesh": HYBRID}):
        step, args = step_of("stack", 3, **options)
        counts.append(_num_sockets())
        step(*args)
        counts.append(_num_sockets())
        step.close()
        counts.append(_num_sockets())
    return counts


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


def _refusals() -> list[str]:
    """What meshes are told that do not fit, of numbers of ranks and of torch's."""
    other_names = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other_order = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    said = []
    for mesh in ({"shard": 3}, {"replicate": 4, "shard": 2}, other_names, other_order, part):
        try:
            step_of("stack", 3, mesh=mesh)
        except UsageError as error:
            said.append(str(error))
    return said


@dataclass(frozen=True)
class _OnFour:
    """What one spawn of four ranks finds out."""

    connections: list[int]
    refusals: list[str]
    sent: list[dict[str, Any]]
    like_fsdp: dict[str, list[str]]
    clipped: list[str]


def _on_four() -> _OnFour:
    clipped = [train_compiled(CASES["stack"], stage, 3, mesh=HYBRID, max_grad_norm=0.5) for stage in (1, 3)]
    return _OnFour(
        _connections(),
        _refusals(),
        [_sent(stage) for stage in range(4)],
        _like_fsdp("stack"),
        differences(clipped[0], clipped[1]),
    )


@pytest.fixture(scope="module")
def on_four() -> list[_OnFour]:
    return run_ranks(_on_four, 4)


@pytest.mark.days(3)
def test_bytes_by_link_are_those_of_theory_of_the_plan_and_of_the_transport(on_four: list[_OnFour]) -> None:
    for of_rank in on_four:
        for stage, found in enumerate(of_rank.sent):
            assert found["planned"] == {"within": 2 * found["within"], "across": 2 * found["across"]}, stage
            # S = R = 2: each hop moves (n - 1) / n of what it is over, and an all-reduce is two of them.
            reduced = found["slices"]
            gathered = found["gathered"] if stage == 3 else found["slices"]
            assert found["within"] == reduced + gathered, stage
            assert found["across"] == 2 * (found["slices"] // 2), stage
            assert found["elsewhere"] == 0


def _like_fsdp(name: str) -> dict[str, list[str]]:
    """What is unlike FSDP2 on a mesh of the same axes, to the bit, by where optimizer states are sliced."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    case, (rank, _) = CASES[name], world()
    model = build(case)
    for layer in model.layers:  # type: ignore[union-attr]  # which models of layers have
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    optimizer = case.optimizer(model)
    losses = []
    for args, kwargs in batches(case, rank, 3):
        optimizer.zero_grad()
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }
    expected = Trained(losses, state)
    return {
        states_over: differences(expected, train_compiled(case, 3, 3, mesh=device_mesh, states_over=states_over))
        for states_over in ("mesh", "shard")
    }


@pytest.mark.days(3)
def test_replicas_train_the_bits_of_fsdp2_with_whole_slices_or_parts_of_them(on_four: list[_OnFour]) -> None:
    assert all(found.like_fsdp == {"mesh": [], "shard": []} for found in on_four)


def test_groups_of_ranks_share_the_connections_of_all_and_close_with_them(on_four: list[_OnFour]) -> None:
    for found in on_four:
        one_axis, two_axes = found.connections[:3], found.connections[3:]
        assert one_axis == two_axes
        assert one_axis[2] < one_axis[1] or not any(one_axis)


def test_meshes_that_do_not_fit_are_refused_on_all_ranks(on_four: list[_OnFour]) -> None:
    for found in on_four:
        expected = [
            "found shard 3, which is 3: give axes whose product is 4",
            "found replicate 4 x shard 2, which is 8",
            "found 'dp', 'tp'",
            "in this order, found 'shard', 'replicate'",
            "expected a DeviceMesh of all ranks in order",
        ]
        assert len(found.refusals) == len(expected)
        assert all(part in said for part, said in zip(expected, found.refusals, strict=True)), found.refusals


def test_stages_clip_alike(on_four: list[_OnFour]) -> None:
    assert all(found.clipped == [] for found in on_four)


def _compiled() -> list[str]:
    eager, compiled = (
        train_compiled(CASES["gpt"], 3, 3, mesh=HYBRID, backend=backend) for backend in ("eager", "inductor")
    )
    return differences(without_key_biases(eager), without_key_biases(compiled), 1e-4)


@pytest.mark.slow
def test_compiled_regions_train_on_a_mesh() -> None:
    assert run_ranks(_compiled, 4) == [[]] * 4


def _saved_and_loaded(folder: str) -> dict[str, Any]:
    """Whether what a mesh has trained goes on elsewhere, and what is shown and changed meanwhile stays."""
    found: dict[str, Any] = {}
    for states_over in ("mesh", "shard"):
        options: dict[str, Any] = {"mesh": HYBRID, "states_over": states_over}
        step, args = step_of("mixed dtypes", 3, **options)
        step(*args)
        step.save_checkpoint(f"{folder}/{states_over}")
        saved, losses = step.full_state_dict(), [step(*args).clone() for _ in range(2)]
        trained, optimizer = step.full_state_dict(), step.optimizer.state_dict()
        for name, other in {"the mesh": options, "one axis": {}, "whole": {"mesh": {"replicate": 4}}}.items():
            again, _ = step_of("mixed dtypes", 3, **other)
            again.load_checkpoint(f"{folder}/{states_over}")
            on_again = [again(*args).clone() for _ in range(2)]
            tolerance = 0.0 if other is options else 5e-3  # some of it in 16 bits
            found[f"{states_over}, {name}"] = differences(
                Trained(losses, trained), Trained(on_again, again.full_state_dict()), tolerance
            )
            again.close()
        with step.full_parameters(write_back=True) as model:
            model.load_state_dict(saved)
        found[f"{states_over}, written back"] = same_tensors(step.full_state_dict(), saved)
        step.optimizer.load_state_dict(optimizer)
        found[f"{states_over}, states"] = all(
            same_tensors(entry, optimizer["state"][key]) for key, entry in step.optimizer.state_dict()["state"].items()
        )
        step.close()
        found[f"{states_over}, closed"] = same_tensors(step.model.state_dict(), saved)
    return found


@pytest.mark.slow
def test_what_a_mesh_trains_is_saved_shown_and_given_back(tmp_path: Path) -> None:
    for found in run_ranks(_saved_and_loaded, 4, str(tmp_path)):
        assert {name: value for name, value in found.items() if value not in ([], True)} == {}


def _states_away(places: list[tuple[str, str]]) -> list[str]:
    """What is unlike states on the device, to the bit; bytes and peaks are asserted to be those predicted."""
    wrong: list[str] = []
    for stage in (1, 3):
        expected = train_compiled(CASES["gpt"], stage, 3, mesh=HYBRID)
        prepared = prepare_case(CASES["gpt"], stage, 4, mesh=Mesh(**HYBRID))
        for tier, update in places:
            plan = placing(prepared, tier, update)
            wrong += differences(expected, train_compiled(CASES["gpt"], stage, 3, mesh=HYBRID, plan=plan))
            step, args = step_of("gpt", stage, mesh=HYBRID, plan=plan)
            check_measured(step.measure(*args, num_steps=2), step.plan, 4096, share=0.001)
            step.close()
    return wrong


@pytest.mark.slow
@pytest.mark.usefixtures("drive", "verified")
def test_states_of_parts_come_and_go() -> None:
    places = [(tier, update) for tier in ("host", "nvme") for update in ("device", "host")]
    assert run_ranks(_states_away, 4, places) == [[]] * 4


def _within_budgets() -> list[str]:
    """What is unlike the same without a budget, to the bit, and which peaks are not those predicted."""
    wrong: list[str] = []
    free, args = step_of("gpt", 3, mesh=HYBRID)
    losses = [free(*args) for _ in range(3)]
    for share in (0.8, 0.6):
        budget = int(free.plan.peak_bytes["device"] * share)
        step, _ = step_of("gpt", 3, mesh=HYBRID, memory_budget=budget, offload="host", machine=small_machine(1e9))
        wrong += [f"loss at {share}" for loss in losses if not torch.equal(loss, step(*args))]
        measured = step.measure(*args, num_steps=2)
        check_measured(measured, step.plan, 4096, share=0.001)
        wrong += [f"peak at {share}"] if measured.peak_bytes["device"] > budget else []
        step.close()
    return wrong


@pytest.mark.slow
def test_budgets_hold_on_a_mesh() -> None:
    assert run_ranks(_within_budgets, 4) == [[]] * 4
