"""Bytes that an update on the host reads and writes, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.lib.graphs import TwoBlocks, prepare
from tests.lib.plans import delaying
from tests.lib.runs.offloads import placing
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import runs_on_host
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.simulate import simulate
from zerofx.scheduler.plan.mesh import Mesh

Make = Callable[[nn.Module], torch.optim.Optimizer]

# Bytes of a parameter: gradients and parameters in the compute dtype, masters and states in float32, once each way.
PASSES: list[tuple[str, Make, str | None, int]] = [
    ("adamw", lambda m: torch.optim.AdamW(m.parameters(), fused=True), "bf16", 2 + 3 * 8 + 2),
    ("adamw", lambda m: torch.optim.AdamW(m.parameters(), fused=True), None, 4 + 3 * 8),
    ("adamw, for each", lambda m: torch.optim.AdamW(m.parameters(), foreach=False), "bf16", 2 + 3 * 8 + 2),
    ("adamw, for each", lambda m: torch.optim.AdamW(m.parameters(), foreach=False), None, 4 + 3 * 8),
    ("sgd", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "bf16", 2 + 8 + 2),
    ("adagrad", lambda m: torch.optim.Adagrad(m.parameters()), None, 4 + 2 * 8),
]


def _bytes_by_bucket(step: StepGraph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in step.calls():
        if runs_on_host(node) and origin(node).phase is Phase.UPDATE:
            cost = node_cost(node, Machine.named("h100-sxm"))
            name = origin(node).layer
            found[name] = found.get(name, 0) + cost.bytes_read + cost.bytes_written
    return found


@pytest.mark.parametrize(("name", "make", "precision", "num_bytes"), PASSES)
def test_an_update_on_the_host_moves_each_byte_once(
    name: str, make: Make, precision: str | None, num_bytes: int
) -> None:
    model = TwoBlocks()
    prepared = prepare(model, optimizer=make(model), stage=2, precision=precision)
    prepared.plan = placing(prepared, "host", "host")
    found = _bytes_by_bucket(prepared.run().step)
    numels = {bucket.name: bucket.updated_numel(2) for bucket in prepared.layout.buckets}
    single = 64  # 0-dim tensors that a fused kernel reads
    for bucket, numel in numels.items():
        assert num_bytes * numel <= found[bucket] <= num_bytes * numel + single, (name, bucket)


def test_a_delayed_update_is_one_pass_too() -> None:
    prepared = delaying(2, precision="bf16")
    found = _bytes_by_bucket(prepared.run().step)
    for bucket in prepared.layout.buckets:
        assert found[bucket.name] == (2 + 2 * 8 + 2) * bucket.updated_numel(2)


def test_seconds_of_an_update_are_those_of_its_bytes_at_the_hosts_rate() -> None:
    model = TwoBlocks()
    prepared = prepare(model, optimizer=PASSES[0][1](model), precision="bf16")
    prepared.plan = placing(prepared, "host", "host")
    machine, step = Machine.named("h100-sxm").for_ranks(1), prepared.run().step
    simulation = simulate(step, machine, Mesh(shard=2), on_cpu=True)
    seconds = sum(timing.seconds for node, timing in simulation.timings.items() if runs_on_host(node))
    assert machine.host.update is not None
    assert seconds == pytest.approx(sum(_bytes_by_bucket(step).values()) / machine.host.update.bandwidth)
