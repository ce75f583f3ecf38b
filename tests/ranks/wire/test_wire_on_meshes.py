"""Training with few bits on the wire on meshes of several axes: four ranks, two to a node.

One mesh of three is trained on in `make test`, another from day to day; all of them in `make nightly`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.distributed import run_ranks
from tests.ranks.wire.test_wire_bits import LR, RANKS_PER_NODE, Run, compiled, largest_gradients, train
from zerofx.ir.op_kernels.quantise import ENCODINGS

# Slices on a node and replicas across; slices across nodes of what ranks of a node share.
MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2, "shard": 2}},
    "states on all replicas": {"mesh": {"replicate": 2, "shard": 2}, "states_over": "shard"},
    "shared": {
        "mesh": {"shard": 2, "model": 2},
        "shardings": {"layers.*.up": "column", "layers.*.down": "row"},
    },
}
pytestmark = pytest.mark.sweep(1)
RUNS = ("1 exact", "1 int4", "3 exact", "3 int8")
Found = tuple[dict[str, Run], float]  # by label; the largest gradient of any rank in the first step


def _run_all(options: dict[str, Any]) -> Found:
    found = {}
    for label in RUNS:
        stage, wire = label.split()
        found[label] = train(compiled(int(stage), wire, **options), num_alike=options["mesh"].get("model", 1))
    return found, max(largest_gradients().values())


@pytest.fixture(scope="module", params=MESHES)
def name(request: pytest.FixtureRequest) -> str:
    """A mesh, and what else is asked for."""
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(name: str) -> list[Found]:
    """What each rank saw on it."""
    return run_ranks(_run_all, 4, MESHES[name])


def test_all_ranks_have_the_same_parameters_and_plan(ranks: list[Found]) -> None:
    for label, run in ranks[0][0].items():
        for other, _ in ranks[1:]:
            assert other[label].plan == run.plan
            assert all(torch.equal(other[label].last[name], tensor) for name, tensor in run.last.items()), label


def test_an_update_is_within_what_rounding_gradients_may_change(ranks: list[Found]) -> None:
    # Summed in slices and then across replicas or nodes, each sum is rounded once.
    runs, largest = ranks[0]
    exact, run = runs["1 exact"], runs["1 int4"]
    assert run.losses[0] == exact.losses[0]
    half = 0.5 / ENCODINGS["int4"].largest
    worst = max(float((run.first[name] - tensor).abs().max()) for name, tensor in exact.first.items())
    assert 0 < worst <= LR * largest * half * (2 + half) * (1 + 1e-4)


def test_training_is_on_a_par_with_exact_training(ranks: list[Found]) -> None:
    for label in ("1 int4", "3 int8"):
        exact, run = (
            sum(found[one].losses[-1] - found[one].losses[0] for found, _ in ranks)
            for one in (f"{label[0]} exact", label)
        )
        assert exact < 0
        assert run == pytest.approx(exact, rel=0.05 if "int4" in label else 0.02), label


def test_what_is_sent_and_held_is_what_was_planned(name: str, ranks: list[Found]) -> None:
    for label, run in ranks[0][0].items():
        assert sum(run.sent.values()) == run.planned_sent, label
        assert run.peak_bytes == pytest.approx(run.planned_peak_bytes, rel=0.01), label
        node = [found[label].sent for found, _ in ranks[:RANKS_PER_NODE]]
        if "exact" not in label:
            assert {where: sum(sent[where] for sent in node) for where in ("within", "across")} == run.planned_by_node
            assert any(reduce == label.split()[1] for _, _, reduce in run.wires)
    assert any(second for _, second, _ in ranks[0][0]["3 int8"].wires) == (name == "shared")


def test_fewer_bytes_leave_a_node(name: str, ranks: list[Found]) -> None:
    if name == "states on all replicas":
        pytest.skip("what all replicas have of a sum crosses exactly, and nothing else leaves a node")
    sent = {label: run.sent["across"] for label, run in ranks[0][0].items()}
    assert sent["3 int8"] < 0.85 * sent["3 exact"]  # with what pads small buckets to whole blocks
