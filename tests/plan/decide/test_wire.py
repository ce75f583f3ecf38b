"""What goes over the wire in few bits: where it makes the step faster, and how many bytes are left across nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerofx
from zerofx.driver.plan_only import PlannedStep
from zerofx.errors import UsageError
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.ir.ops import COLLECTIVES, exchange, gather_on_node
from zerofx.ir.streams import axes_of
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.cost.wire_volume import node_wire_bytes
from zerofx.scheduler.plan.plan import Plan

WIDTH = 256
H100 = Machine.named("h100-sxm")
SLOW = dataclasses.replace(H100, name="slow network", inter_node=Link(1e8, 1e-6))
FAST = dataclasses.replace(H100, name="one large node", inter_node=Link(1e15, 1e-12), intra_node=Link(1e15, 1e-12))


class Layer(nn.Module):
    """A square linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Numbered(Layers):
    """Layers, and whole numbers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.empty(WIDTH, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offsets)


def planned(machine: Machine = SLOW, world_size: int = 32, rows: int = 64, model: Any = Layers, **options: Any) -> (
    PlannedStep
):  # fmt: skip
    with torch.device("meta"):
        made, x = model(), torch.empty(rows, WIDTH)
    given = {"precision": "bf16", "backend": "eager", "recompute": "none", **options}
    return zerofx.plan(made, torch.optim.SGD(made.parameters()), (x,), world_size=world_size, machine=machine, **given)


def across(step: PlannedStep, nodes: Iterable[fx.Node] | None = None) -> int:
    """Bytes that leave a node."""
    taken = step.lowered.graph.calls() if nodes is None else nodes
    sent = node_wire_bytes(
        [node for node in taken if node.target in COLLECTIVES],
        step.plan.mesh, step.machine.ranks_per_node, pairwise=False,
    )  # fmt: skip
    return sent["across"]


def of_bucket(step: PlannedStep, bucket: int) -> list[fx.Node]:
    return [node for node in step.lowered.graph.calls() if node.target in COLLECTIVES and node.args[1] == bucket]


@pytest.mark.parametrize("world_size", [16, 64, 1024])
def test_three_psi_across_nodes_become_three_quarters(world_size: int) -> None:
    # Psi is what a bucket takes in 16 bits; (N - 1) / N of it leave a node in a ring, (n - 1) / n from node to node.
    nodes = world_size // H100.ranks_per_node
    ring, between = Fraction(world_size - 1, world_size), Fraction(nodes - 1, nodes)
    scales = Fraction(4, BLOCK)
    exact, *rounded = (planned(world_size=world_size, wire=wire) for wire in ("exact", "int8", "int4", "fp8"))
    int4 = rounded[1]
    twice = [b for b in range(4) if [g.bucket for g in exact.plan.gathers].count(b) == 2]
    assert len(twice) == 2
    for bucket in range(4):
        psi = 2 * exact.layout.buckets[bucket].numel
        small = 2 * int4.layout.buckets[bucket].numel
        gathers = 2 if bucket in twice else 1
        assert across(exact, of_bucket(exact, bucket)) == (gathers + 1) * psi * ring
        for step, bits in zip(rounded, (8, 4, 8), strict=True):
            reduced = small / 2 * (Fraction(bits, 8) + scales) * between
            assert across(step, of_bucket(step, bucket)) == small / 2 * (1 + scales) * ring + reduced
        # Without scales, and with as many nodes as make no difference: 3 Psi, and 3/4 Psi.
        assert across(exact, of_bucket(exact, bucket)) / psi == (3 if bucket in twice else 2) * ring
        payload = across(int4, of_bucket(int4, bucket)) / (small * (1 + 4 / BLOCK))
        assert payload < 0.75 + 2 * 4 / BLOCK
    for step, gather in zip(rounded, ("int8", "int8", "fp8"), strict=True):
        assert step.plan.node_wire_bytes["across"] == across(step)
        assert all(one.gather == gather and one.reduce == step.plan.wire for one in step.plan.wires)
        assert [one.bucket for one in step.plan.wires if one.second_shard] == twice
        assert step.plan.step_seconds < exact.plan.step_seconds / 2


def test_the_simulation_counts_all_that_is_sent() -> None:
    for wire in ("exact", "int4"):
        step = planned(wire=wire)
        simulation: Simulation = step.lowered.simulation
        # Every rank sends as much as every other: a node's ranks send as much more.
        assert sum(simulation.node_wire_bytes.values()) == pytest.approx(8 * step.plan.wire_bytes)


def test_what_hides_behind_computation_stays_exact() -> None:
    free, exact = (planned(FAST, rows=4096, wire=wire) for wire in ("int8", "exact"))
    assert len(free.plan.wires) == len(free.plan.buckets)
    assert all(one.is_exact and "computation hides it" in one.reason for one in free.plan.wires)
    assert [str(node.target) for node in free.lowered.graph.calls()] == [
        str(node.target) for node in exact.lowered.graph.calls()
    ]
    assert free.plan.reduces == exact.plan.reduces and free.plan.gathers == exact.plan.gathers


def test_a_plan_is_never_slower_than_the_exact_one_and_mixes_both() -> None:
    mixed = 0
    for bandwidth in (1e9, 1e10, 5e10):
        machine = dataclasses.replace(H100, name="network", inter_node=Link(bandwidth, 1e-6))
        exact = planned(machine, rows=65536, world_size=16).plan
        free = planned(machine, rows=65536, world_size=16, wire="int8").plan
        assert free.step_seconds <= exact.step_seconds * (1 + 1e-9)
        mixed += len({(one.gather, one.second_shard, one.reduce) for one in free.wires}) > 1
    assert mixed


def test_one_node_has_no_second_shards_and_one_hop() -> None:
    crowded = dataclasses.replace(SLOW, name="crowded", intra_node=Link(1e8, 1e-6))
    step = planned(crowded, world_size=8, wire="int8")
    assert any(not one.is_exact for one in step.plan.wires)
    assert not any(one.second_shard or one.hop_after for one in step.plan.wires)
    assert across(step) == 0


@pytest.mark.parametrize(("wire", "bits"), [("int8", 8), ("int4", 4)])
def test_replicas_on_other_nodes_send_each_other_few_bits(wire: str, bits: int) -> None:
    step = planned(wire=wire, mesh={"replicate": 4, "shard": 8}, states_over="mesh")
    exchanges = [node for node in step.lowered.graph.calls() if node.target is exchange]
    assert {axes_of(node, step.plan.mesh) for node in exchanges} >= {("replicate",)}
    crossing = [node for node in exchanges if axes_of(node, step.plan.mesh) == ("replicate",)]
    numel = sum(bucket.numel for bucket in step.layout.buckets)
    assert across(step, crossing) == numel * (Fraction(bits, 8) + Fraction(4, BLOCK)) * Fraction(3, 4)
    assert across(step) == step.plan.node_wire_bytes["across"]
    assert not any(one.second_shard or one.hop_after for one in step.plan.wires), "slices are on one node"


def test_slices_on_two_nodes_are_summed_in_two_hops_before_they_cross() -> None:
    step = planned(wire="int4", mesh={"replicate": 2, "shard": 16})
    names = [node.name for node in step.lowered.graph.calls()]
    two_hops = [one.bucket for one in step.plan.wires if one.hop_after]
    assert two_hops
    for bucket in two_hops:
        hops = [f"{hop}_{bucket}" for hop in ("reduce", "reduce_across", "grad", "cross", "part_grad")]
        assert [names.index(hop) for hop in hops] == sorted(names.index(hop) for hop in hops)
        late = names[names.index(f"cross_{bucket}") : names.index(f"part_grad_{bucket}")]
        assert bucket == two_hops[-1] or len(late) > 1, "something hides the hop across replicas"


def test_ranks_that_share_a_computation_keep_second_shards_of_what_all_have() -> None:
    mesh = {"shard": 4, "model": 8}  # a node shares a computation, and whole parameters are in slices on all
    step = planned(wire="int8", mesh=mesh, shardings={"layers.*": "replicated"})
    assert {(one.gather, one.reduce) for one in step.plan.wires} == {("int8", "int8")}
    assert any(one.second_shard for one in step.plan.wires)
    on_node = {axes_of(n, step.plan.mesh) for n in step.lowered.graph.calls() if n.target is gather_on_node}
    assert on_node == {("shard", "model")}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_without_gathers_reduce_in_few_bits(stage: int) -> None:
    step = planned(stage=stage, wire="int4")
    assert {(one.gather, one.second_shard, one.reduce) for one in step.plan.wires} == {("exact", False, "int4")}
    assert step.plan.step_seconds < planned(stage=stage).plan.step_seconds


def test_second_shards_are_given_up_where_the_budget_has_no_room() -> None:
    options: dict[str, Any] = {"wire": "int8", "rows": 8}
    free = planned(**options)
    least = planned(rows=8).plan.peak_bytes["device"]
    found = [planned(memory_budget=budget, **options).plan for budget in range(least, least + 400_000, 80_000)]
    counts = [sum(one.second_shard for one in plan.wires) for plan in found]
    for plan in found:
        assert plan.memory_budget is not None and plan.peak_bytes["device"] <= plan.memory_budget
    assert min(counts) < sum(one.second_shard for one in free.plan.wires)


def test_whole_numbers_are_sent_exactly() -> None:
    step = planned(model=Numbered, wire="int8")
    kinds = {b.name: (b.compute_dtype, w) for b, w in zip(step.layout.buckets, step.plan.wires, strict=True)}
    whole = [wire for dtype, wire in kinds.values() if not dtype.is_floating_point]
    assert whole and all(one.is_exact for one in whole)
    assert any(not one.is_exact for one in step.plan.wires)


def test_a_plan_goes_to_json_and_back_and_an_exact_one_says_nothing_of_wires() -> None:
    exact, free = planned().plan, planned(wire="int8").plan
    back = Plan.from_json(free.to_json())
    assert back == free and back.decisions_hash() == free.decisions_hash() and back.prediction == free.prediction
    assert free.decisions_hash() == planned(wire="int8").plan.decisions_hash() != exact.decisions_hash()
    text = exact.to_json()
    assert not any(word in text for word in ('"wire"', '"wires"', "ranks_per_node", "node_wire_bytes"))
    assert Plan.from_json(text) == exact


def test_plans_say_what_is_sent_how() -> None:
    exact, free = planned().plan, planned(wire="int4").plan
    text = str(free)
    assert "sent by each node: " in text and " across nodes" in text
    assert "gathered in int8, gathered again from second shards of" in text and "reduced in int4: the step is" in text
    words = "sent exactly -> gathered in int8, gathered again from second shards, reduced in int4"
    assert words in exact.diff(free) and "wire: exact -> int4" in exact.diff(free)
    assert "wire: gathered in int8" in free.why("layers.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": "int8", "world_size": 12}, "expected whole nodes of 8 ranks .*found 12 ranks"),
        ({"wire": "int8", "world_size": 24, "mesh": {"replicate": 2, "shard": 12}}, "found 24 ranks .* along shard"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(**options)


def test_one_rank_sends_nothing() -> None:
    plan = planned(world_size=1, wire="int8").plan
    assert plan.wire_bytes == 0 and all(one.is_exact for one in plan.wires)
