"""Training with few bits on the wire, on real ranks: two to a node, on two nodes where there are four."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.ranks.session.test_ranks import error_of
from zerofx.ir.op_kernels.quantise import ENCODINGS
from zerofx.ir.ops import dequantise, quantise
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.session.step import Step

WIDTH = 32
RANKS_PER_NODE = 2
STEPS = 12
LR = 0.05
# Links so slow that computation hides nothing.
MACHINE = dataclasses.replace(
    Machine.named("cpu"), name="slow", intra_node=Link(1e6, 1e-6), inter_node=Link(1e5, 1e-6),
    ranks_per_node=RANKS_PER_NODE,
)  # fmt: skip


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Model(nn.Module):
    """Three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = (self.head(x).squeeze(-1) - y).square().mean()
        return loss


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(num_alike: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's batch, which as many neighbours have."""
    generator = torch.Generator().manual_seed(dist.get_rank() // num_alike)
    x = torch.randn(8, WIDTH, generator=generator)
    return x, x.sum(1).tanh()


def compiled(stage: int, wire: str, **options: Any) -> Step:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"wire": wire, "machine": MACHINE, "backend": "eager", **options}
    return zerofx.compile(model, optimizer, stage, **options)


@dataclass
class Run:
    """What one rank saw of one training run."""

    losses: list[float]
    first: dict[str, Tensor]  # the parameters after the first step
    last: dict[str, Tensor]
    sent: dict[str, int]  # in one step
    planned_sent: int
    planned_by_node: dict[str, int]
    peak_bytes: int
    planned_peak_bytes: int
    plan: str
    wires: list[tuple[str, bool, str]]


@dataclass
class Found:
    """What one rank saw in one world."""

    runs: dict[str, Run] = field(default_factory=dict)
    largest_gradients: dict[str, float] = field(default_factory=dict)  # of any rank in the first step
    rounded: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def train(step: Step, steps: int = STEPS, num_alike: int = 1) -> Run:
    x, y = batch(num_alike)
    losses = [float(step(x, y))]
    first = step.full_state_dict()
    losses += [float(step(x, y)) for _ in range(steps - 1)]
    assert step._steps.taken is not None
    before = dict(step._steps.taken.runtime.sent_to)
    step(x, y)
    node, sent = dist.get_rank() // RANKS_PER_NODE, {"within": 0, "across": 0}
    for peer, total in step._steps.taken.runtime.sent_to.items():
        sent["within" if peer // RANKS_PER_NODE == node else "across"] += total - before.get(peer, 0)
    last = step.full_state_dict()
    measured = step.measure(x, y)
    plan = step.plan
    return Run(
        losses, first, last, sent, plan.wire_bytes, plan.node_wire_bytes, measured.peak_bytes["device"],
        plan.peak_bytes["device"], plan.decisions_hash(), [(w.gather, w.second_shard, w.reduce) for w in plan.wires],
    )  # fmt: skip


def largest_gradients() -> dict[str, float]:
    model = build()
    model(*batch()).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = parameter.grad.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found[name] = float(largest)
    return found


def with_rounded_weights(wire: str) -> dict[str, Any]:
    """A step whose gathers alone are changed, beside a plain model whose weights are rounded as they come."""
    made = compiled(3, wire)
    made.prepare(*batch())
    plan = made.plan
    made.close()
    plan = replace(
        plan,
        wires=tuple(replace(wire, reduce="exact", hop_after=None) for wire in plan.wires),
        prediction=None,
    )
    step = compiled(3, wire, plan=plan)
    loss = step(*batch())
    plain, exact = build(), dict(build().named_parameters())
    assert step._steps.taken is not None
    for bucket in step._steps.taken.state.layout.buckets:
        flat = torch.zeros(bucket.numel)
        for slot in bucket.slots:
            slot.view(flat).copy_(exact[slot.name].detach())
        rounded = dequantise(quantise(flat, bucket.num_ranks, wire), bucket.num_ranks, wire, torch.float32)
        for slot in bucket.slots:
            plain.get_parameter(slot.name).data.copy_(slot.view(rounded))
    rounded_loss = plain(*batch())
    rounded_loss.backward()
    expected = {}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        expected[name] = exact[name].detach() - LR * parameter.grad / dist.get_world_size()
    return {
        "losses": (loss, rounded_loss.detach()), "expected": expected, "found": step.full_state_dict(),
        "seconds": sum(wire.second_shard for wire in plan.wires),
    }  # fmt: skip


def run_some(labels: tuple[str, ...], gathers: str) -> Found:
    found = Found()
    for label in labels:
        stage, wire = label.split()
        found.runs[label] = train(compiled(int(stage), wire))
    found.largest_gradients = largest_gradients()
    found.rounded = with_rounded_weights(gathers)
    plan = compiled(3, "int8")
    plan.prepare(*batch())
    found.errors["plan"] = error_of(lambda: compiled(3, "exact", plan=plan.plan).prepare(*batch()))
    found.errors["ranks differ"] = error_of(
        lambda: compiled(3, "int8" if dist.get_rank() else "int4").prepare(*batch())
    )
    return found


@pytest.fixture(scope="module")
def four_ranks() -> list[Found]:
    """Two nodes of two ranks."""
    labels = ("1 exact", "1 int4", "3 exact", "3 int8", "3 int4")
    return run_ranks(run_some, 4, labels, "int8")


@pytest.fixture(scope="module")
def two_ranks() -> list[Found]:
    """One node of two ranks."""
    labels = ("2 exact", "2 int8", "2 fp8", "3 exact", "3 int4", "3 fp8")
    return run_ranks(run_some, 2, labels, "fp8")


@pytest.fixture(params=["two_ranks", "four_ranks"])
def world(request: pytest.FixtureRequest) -> list[Found]:
    """What each rank of a world saw."""
    found: list[Found] = request.getfixturevalue(request.param)
    return found


@pytest.mark.days(3)
def test_all_ranks_have_the_same_parameters_and_plan(world: list[Found]) -> None:
    for label, run in world[0].runs.items():
        for other in world[1:]:
            assert other.runs[label].plan == run.plan
            for name, tensor in run.last.items():
                assert torch.equal(other.runs[label].last[name], tensor), (label, name)


def test_an_update_is_within_what_rounding_gradients_may_change(world: list[Found]) -> None:
    # With g the largest gradient of any rank and s half of the largest step as a part of the largest value, N ranks'
    # sums within nodes are off by N g s at the most, and the sums of these, each at most (1 + s) times its share of
    # N g, by N g (1 + s) s more.
    largest = max(world[0].largest_gradients.values())
    labels = [label for label in world[0].runs if label[0] != "3" and "exact" not in label]
    assert labels
    for label in labels:
        kind = ENCODINGS[label.split()[1]]
        half = (16 if kind.dtype.is_floating_point else 0.5) / kind.largest
        hops = 2 + half if len(world) > RANKS_PER_NODE else 1
        exact, run = world[0].runs[f"{label[0]} exact"], world[0].runs[label]
        assert run.losses[0] == exact.losses[0]
        worst = max(float((run.first[name] - tensor).abs().max()) for name, tensor in exact.first.items())
        assert 0 < worst <= LR * largest * half * hops * (1 + 1e-4)


def test_forward_and_backward_compute_with_weights_rounded_once(world: list[Found]) -> None:
    for rank in world:
        loss, expected = rank.rounded["losses"]
        assert torch.equal(loss, expected)
        for name, tensor in rank.rounded["expected"].items():
            torch.testing.assert_close(rank.rounded["found"][name], tensor, rtol=1e-5, atol=1e-7)
        assert (rank.rounded["seconds"] > 0) == (len(world) > RANKS_PER_NODE)


def test_training_is_on_a_par_with_exact_training(world: list[Found]) -> None:
    def mean(label: str, number: int) -> float:
        return sum(rank.runs[label].losses[number] for rank in world) / len(world)

    for label in world[0].runs:
        kind = f"{label[0]} exact"
        fallen, expected = (mean(one, 0) - mean(one, -1) for one in (label, kind))
        assert expected > 0.3 * mean(kind, 0)
        assert fallen == pytest.approx(expected, rel=0.05 if "int4" in label else 0.02), label


def test_what_is_sent_and_held_is_what_was_planned(world: list[Found]) -> None:
    for label, run in world[0].runs.items():
        assert sum(run.sent.values()) == run.planned_sent, label
        assert run.peak_bytes == pytest.approx(run.planned_peak_bytes, rel=0.01), label
        if "exact" not in label:
            node = [rank.runs[label].sent for rank in world[:RANKS_PER_NODE]]
            assert {where: sum(sent[where] for sent in node) for where in ("within", "across")} == run.planned_by_node
            assert any(wire != ("exact", False, "exact") for wire in run.wires)
        else:
            assert run.planned_by_node == {} and run.wires == []


def test_fewer_bytes_leave_a_node(four_ranks: list[Found]) -> None:
    sent = {label: run.sent["across"] for label, run in four_ranks[0].runs.items()}
    assert sent["1 int4"] < 0.75 * sent["1 exact"]  # what is left is the exact gather of new values
    assert sent["3 int4"] < sent["3 int8"] < 0.2 * sent["3 exact"]


def test_what_does_not_go_together_is_refused_on_every_rank(world: list[Found]) -> None:
    for rank in world:
        assert "wire: expected int8, found exact" in rank.errors["plan"]
        assert rank.errors["ranks differ"].startswith("RankMismatchError") and "wire" in rank.errors["ranks differ"]


def train_variants() -> dict[str, tuple[Run, Run]]:
    """Exact training and that with few bits, by what else is asked for."""
    variants: dict[str, dict[str, Any]] = {
        "inductor": {"backend": "inductor"}, "again": {}, "accumulate": {"accumulate": 2}, "bf16": {"precision": "bf16"}
    }  # fmt: skip
    found = {name: (train(compiled(3, "exact", **o)), train(compiled(3, "int8", **o))) for name, o in variants.items()}
    return {**found, "twice": (train(compiled(3, "int4")), train(compiled(3, "int4")))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing Inductor warns
def test_what_else_is_asked_for_goes_with_it() -> None:
    ranks = run_ranks(train_variants, 4, timeout=1800.0)
    one, again = ranks[0].pop("twice")
    assert one.losses == again.losses and all(torch.equal(again.last[n], tensor) for n, tensor in one.last.items())
    for name, (exact, run) in ranks[0].items():
        assert any(wire != ("exact", False, "exact") for wire in run.wires), name
        assert sum(run.sent.values()) == run.planned_sent, name
        assert run.peak_bytes == pytest.approx(run.planned_peak_bytes, rel=0.01), name
        assert run.losses[-1] == pytest.approx(exact.losses[-1], rel=0.05, abs=0.01), name
