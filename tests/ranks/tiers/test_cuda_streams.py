"""What runs on a GPU's streams is waited for, and keeps its memory: played on a CPU, with the same bits as without."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerofx
from tests.compiled.cuda_stand_in.streams import Stream, Streams, on_streams
from tests.lib.distributed import run_ranks
from tests.lib.graphs import Prepared
from tests.lib.models import CASES
from tests.lib.runs.offloads import offloading, parameters_away, placing, prepare_case, recomputing
from tests.lib.runs.training import differences, train_compiled
from tests.ranks.wire.test_wire_bits import MACHINE as SLOW
from zerofx import Plan

pytestmark = pytest.mark.usefixtures("drive", "verified")

STEPS = 3


def _wrong(name: str, stage: int, options: dict[str, Any]) -> list[str]:
    """What is wrong with training on streams, beside the same without, whose graphs have been checked."""
    case = CASES[name]
    expected = train_compiled(case, stage, STEPS, **options)
    with on_streams() as streams, mock.patch.dict(os.environ, ZEROFX_VERIFY="0"):
        found = train_compiled(case, stage, STEPS, **options)
    nothing = [] if streams.num_given else ["nothing was given to a stream"]
    return [*nothing, *differences(expected, found), *sorted(set(streams.races))]


# Of cases, at stages, with options.
COLLECTIVES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"stage {stage}": ("stack", stage, {}) for stage in range(4)},
    "micro-batches, clipped": ("gpt", 3, {"accumulate": 2, "max_grad_norm": 0.5}),
    "casts": ("gpt", 3, {"precision": "bf16"}),
    "casts of llama": ("llama", 3, {"precision": "bf16"}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("what", COLLECTIVES)
def test_collectives_are_waited_for(what: str) -> None:
    assert run_ranks(_wrong, 2, *COLLECTIVES[what]) == [[], []]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_in_few_bits_between_nodes_are_waited_for(stage: int) -> None:
    """Gathers and reductions in few bits, with second shards on each of two nodes."""
    assert run_ranks(_wrong, 4, "stack", stage, {"wire": "int8", "machine": SLOW}) == [[]] * 4


def _on_a_mesh() -> dict[str, list[str]]:
    """Collectives within slices and across replicas, each with a stream of its own."""
    mesh = {"replicate": 2, "shard": 2}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        **{f"stage {stage}": (stage, {}) for stage in (0, 1, 3)},
        "whole slices, clipped": (3, {"states_over": "shard", "max_grad_norm": 0.5}),
    }
    return {
        label: wrong
        for label, (stage, options) in runs.items()
        if (wrong := _wrong("gpt", stage, options | {"mesh": mesh}))
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collectives along different axes of the mesh run one after the other")
def test_collectives_of_replicas_are_waited_for() -> None:
    assert run_ranks(_on_a_mesh, 4) == [{}] * 4


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tiers", "again"),
    [
        (["host"], False),
        (["host", "nvme"], True),
        pytest.param(["host"], True, marks=pytest.mark.slow),
        pytest.param(["host", "nvme"], False, marks=pytest.mark.slow),
    ],
)
def test_activations_are_offloaded_and_reloaded_in_time(tiers: list[str], again: bool) -> None:
    prepared = prepare_case(CASES["gpt"], 0, 1)
    plan = offloading(prepared, recomputing(prepared) if again else prepared.plan, tiers)
    assert not _wrong("gpt", 0, {"plan": plan})


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tier", "update"),
    [
        ("host", "host"),
        ("nvme", "device"),
        pytest.param("host", "device", marks=pytest.mark.slow),
        pytest.param("nvme", "host", marks=pytest.mark.slow),
    ],
)
def test_states_come_and_go_in_time(tier: str, update: str) -> None:
    plan = placing(prepare_case(CASES["gpt"], 0, 1), tier, update)
    assert not _wrong("gpt", 0, {"plan": plan})


def test_updates_beside_the_next_step_are_waited_for() -> None:
    assert not _wrong("gpt", 0, {"delayed_update": 1})


AWAY: dict[str, Callable[[Prepared], Plan]] = {
    "activations": lambda prepared: offloading(prepared, prepared.plan, ["host"]),
    "parameters": lambda prepared: parameters_away(prepared, "host", ("host", "device")),
    "all on nvme": lambda prepared: parameters_away(prepared, "nvme", ("nvme", "host")),
}


def _away(what: str, drive: str) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    return _wrong("gpt", 3, {"plan": AWAY[what](prepare_case(CASES["gpt"], 3, 2))})


@pytest.mark.sweep(1)
@pytest.mark.parametrize("what", AWAY)
def test_slices_that_are_elsewhere_are_there_when_they_are_gathered(what: str, drive: Path) -> None:
    assert run_ranks(_away, 2, what, str(drive)) == [[], []]


def _without(patch: Callable[[pytest.MonkeyPatch], None], name: str, stage: int, **options: Any) -> list[str]:
    """What is found of a runtime that ``patch`` has made worse."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", zerofx.errors.ZeroFXWarning)  # memory that nothing is in yet may hold NaN
        patch(patched)
        return _wrong(name, stage, options)


def _no_waits(patched: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_event

    def wait_elsewhere(stream: Stream, event: Any) -> None:
        if stream is not stream.streams.compute:
            wait(stream, event)

    patched.setattr(Stream, "wait_event", wait_elsewhere)


def _no_beginnings(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Stream, "wait_stream", lambda *_: None)


def _found() -> list[list[str]]:
    return [
        _without(_no_waits, "stack", 3),
        _without(_no_beginnings, "stack", 3),
    ]


def test_what_is_not_waited_for_is_found() -> None:
    for unawaited, early in run_ranks(_found, 2):
        assert any(line.startswith("loss") for line in unawaited)
        assert any("begins without waiting for computation" in line for line in early)


def test_a_copy_that_is_not_waited_for_is_found() -> None:
    prepared = prepare_case(CASES["stack"], 0, 1)
    plan = offloading(prepared, prepared.plan, ["host"])
    assert any(line.startswith("loss") for line in _without(_no_waits, "stack", 0, plan=plan))


def test_work_runs_behind_what_its_stream_has_waited_for_and_not_before_it_must() -> None:
    streams = Streams()
    first, second = streams.side(), streams.side()
    ran: list[str] = []
    for stream, name in ((first, "a"), (second, "b")):
        stream.wait_stream(streams.compute)
        stream.give(name, partial(ran.append, name), [], 0)
    second.wait_stream(first)
    second.wait_stream(streams.compute)
    second.give("c", partial(ran.append, "c"), [], 0)
    assert not ran
    streams.compute.wait_stream(second)
    assert ran == ["b", "a", "c"] and not streams.races


def test_memory_that_is_let_go_of_before_the_work_has_run_is_found_unless_it_is_recorded() -> None:
    streams = Streams()
    side = streams.side()
    kept, freed, recorded = (torch.empty(4) for _ in range(3))
    streams.record(recorded, side)
    for name, used in (("kept", kept), ("freed", freed), ("recorded", recorded)):
        side.wait_stream(streams.compute)
        side.give(name, bool, [used.untyped_storage()], 0)
    del freed, recorded, used
    streams.finish()
    assert streams.races == ["freed uses memory that has been let go of"] and kept.numel()
