"""States on nvme pass through the host in the buffers of three buckets, however deep the model is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.chains import Equal
from tests.lib.graphs import Prepared, prepare
from tests.lib.runs.offloads import placing
from zerofx.ir import ops
from zerofx.ir.streams import ends_of, runs_on_host
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.cost.machine import Link, Machine, Nvme
from zerofx.scheduler.cost.timeline import seconds_by_place
from zerofx.scheduler.decide.ledger import NUM_BUFFERS
from zerofx.scheduler.decide.prefetch import place_arrivals
from zerofx.scheduler.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("drive", "verified")

DIM = 64
NUM_BYTES = 4 * DIM * DIM  # of one layer's parameters


def machine(bytes_per_second: float) -> Machine:
    """A CPU with a drive of this speed in each direction."""
    drive = Link(bytes_per_second, 1e-6)
    return replace(Machine.named("cpu"), nvme=Nvme(2**40, drive, drive))


def built(depth: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Equal(depth, DIM)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), (torch.randn(2, DIM),)


@dataclass(frozen=True)
class Watched(Plan):
    """A plan that counts how often someone asks where states are to be."""

    num_looks: ClassVar[list[int]] = [0]

    def __getattribute__(self, name: str) -> Any:
        if name == "states":
            Watched.num_looks[0] += 1
        return super().__getattribute__(name)


def test_states_that_are_where_the_plan_has_them_are_not_looked_for() -> None:
    model, optimizer, batch = built(2)
    step = zerofx.compile(model, optimizer, backend="eager")
    step(*batch)
    taken = step._steps.taken
    assert taken is not None
    plan = Watched(**{field.name: getattr(step.plan, field.name) for field in fields(step.plan)})
    taken.place(plan)
    looks = Watched.num_looks[0]
    taken.place(plan)
    assert Watched.num_looks[0] == looks > 0
    step.close()


def streaming(depth: int, update: str, bytes_per_second: float) -> tuple[Prepared, Plan]:
    """The plan with all states on nvme, each copied as its timeline has it."""
    model, optimizer, batch = built(depth)
    prepared = prepare(model, batch, stage=0, num_ranks=1, optimizer=optimizer)
    prepared.plan = place_arrivals(
        placing(prepared, "nvme", update), prepared.step, prepared.layout,
        {bucket.index: 2 * bucket.full_bytes for bucket in prepared.layout.buckets},
        seconds_by_place(prepared.step, machine(bytes_per_second)), machine(bytes_per_second), ahead=True,
    )  # fmt: skip
    return prepared, prepared.plan


@pytest.mark.days(3)
# Computation waits for each bucket; or reading ahead saves it that.
@pytest.mark.sweep(2)
@pytest.mark.parametrize("bytes_per_second", [1e8, 3e9])
@pytest.mark.parametrize("update", ["device", "host"])
def test_what_passes_through_the_host_does_not_grow_with_depth(update: str, bytes_per_second: float) -> None:
    peaks = []
    for depth in (8, 16, 32):
        prepared, _ = streaming(depth, update, bytes_per_second)
        peaks.append(liveness(prepared.run().step, on_cpu=True).peaks["host"])
    assert peaks[0] == peaks[1] == peaks[2]
    # Two moments, and where the host updates, the values themselves; also the gradients of the bucket that it updates
    # and of the next one, which comes down meanwhile.
    passing = 3 if update == "host" else 2
    assert peaks[2] <= NUM_BUFFERS * passing * NUM_BYTES + (2 * NUM_BYTES if update == "host" else 0)


def test_a_drive_would_be_read_far_ahead_otherwise() -> None:
    prepared, plan = streaming(24, "host", 3e9)
    assert [one.takes_over for one in plan.states if one.takes_over is not None]
    prepared.plan = plan.replace_absences(states=tuple(replace(one, takes_over=None) for one in plan.states))
    found = liveness(prepared.run().step, on_cpu=True).peaks["host"]
    assert found > 2 * NUM_BUFFERS * 3 * NUM_BYTES  # and more, the deeper the model


def test_one_bucket_is_read_while_another_is_updated_and_a_third_written() -> None:
    prepared, plan = streaming(12, "host", 3e9)
    step = prepared.run().step
    order = step.positions()
    copies = [node for node in step.calls() if node.target in ops.TRANSFERS and "nvme" in ends_of(node)]
    spans = [(order[node], order[next(iter(node.users))], ends_of(node)[1]) for node in copies]
    updates = [order[node] for node in step.calls() if runs_on_host(node) and node.target is not ops.wait]
    beside = [{to for start, end, to in spans if start < place < end} for place in updates]
    assert sum(sides == {"host", "nvme"} for sides in beside) > len(updates) / 4
    assert len(plan.states) == 12


@pytest.mark.sweep(1)
@pytest.mark.parametrize("update", ["device", "host"])
def test_the_pool_takes_what_is_planned_and_training_is_the_same(update: str) -> None:
    taken = []
    for depth in (8, 16):
        _, plan = streaming(depth, update, 3e9)
        model, optimizer, batch = built(depth)
        step = zerofx.compile(model, optimizer, 0, plan=plan, machine=machine(3e9), backend="eager")
        found = step.measure(*batch, num_steps=2)
        assert found.peak_bytes["host"] == step.plan.peak_bytes["host"]
        assert found.link_bytes == step.plan.link_bytes
        assert step._steps.tiers is not None
        planned = step.compiled.lowered.simulation.live.host_block_bytes
        assert step._steps.tiers.host_block_bytes <= planned
        taken.append((found.peak_bytes["host"], planned))
        plain, eager, _ = built(depth)
        for _ in range(2):
            eager.zero_grad()
            plain(*batch).backward()
            eager.step()
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in step.full_state_dict().items())
        step.close()
    assert taken[0] == taken[1]
