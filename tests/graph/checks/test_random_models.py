"""Whatever the model, stage, world and plan: the passes leave a valid graph that does what was planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lib.graphs import DIM, ROWS, calls, prepare
from zerofx.codegen.emit import emit
from zerofx.codegen.regions import cut
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.liveness import liveness


class _Mix(nn.Module):
    """Linear, norm or both; two of them in one layer make a bucket of several parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=kind != "plain") if kind != "norm" else None
        self.norm = nn.LayerNorm(DIM) if kind in ("norm", "both") else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return x if self.linear is None else torch.tanh(self.linear(x))


class _Random(nn.Module):
    """Layers called in any order and any number of times, with a residual stream and a head."""

    def __init__(self, kinds: list[str], calls: list[int], skip: bool, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Mix, kinds))
        self.calls = [index % len(kinds) for index in calls]
        self.skip = skip
        self.head = nn.Linear(DIM, DIM, bias=not tied)
        first = self.layers[0]
        assert isinstance(first, _Mix)
        if tied and first.linear is not None:
            self.head.weight = first.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        for index in self.calls:
            x = x + self.layers[index](x) if self.skip else self.layers[index](x)
        loss: Tensor = self.head(x).square().mean()
        return loss


@dataclass(frozen=True)
class _Sample:
    kinds: list[str]
    calls: list[int]
    skip: bool
    tied: bool
    frozen: frozenset[int]
    stage: int
    num_ranks: int
    prefetch: int
    keep: tuple[str, ...] | str
    precision: str | None
    adam: bool

    def model(self) -> nn.Module:
        model = _Random(self.kinds, self.calls, self.skip, self.tied)
        for number, parameter in enumerate(model.layers.parameters()):
            if number in self.frozen:
                parameter.requires_grad_(False)
        model.head.weight.requires_grad_(True)
        return model


_SAMPLES = st.builds(
    _Sample,
    kinds=st.lists(st.sampled_from(["plain", "bias", "norm", "both"]), min_size=1, max_size=4),
    calls=st.lists(st.integers(0, 3), max_size=5),
    skip=st.booleans(),
    tied=st.booleans(),
    frozen=st.frozensets(st.integers(0, 11), max_size=6),
    stage=st.integers(0, 3),
    num_ranks=st.integers(1, 4),
    prefetch=st.integers(0, 3),
    keep=st.sampled_from([(), "all", ("layers.0",), ("layers.0", "layers.2")]),
    precision=st.sampled_from([None, "bf16"]),
    adam=st.booleans(),
)


@pytest.mark.days(3)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sample=_SAMPLES)
def test_the_passes_do_what_the_plan_says_to_any_model(sample: _Sample) -> None:
    model = sample.model()
    optimizer = (torch.optim.Adam if sample.adam else torch.optim.SGD)(model.parameters(), lr=0.1, foreach=False)
    prepared = prepare(
        model, (torch.zeros(ROWS, DIM),), stage=sample.stage, num_ranks=sample.num_ranks, prefetch=sample.prefetch,
        keep=sample.keep, optimizer=optimizer, precision=sample.precision,
    )  # fmt: skip
    prepared.run_pipeline()  # verifies after every pass, and against the plan after the last
    step, plan, layout = prepared.step, prepared.plan, prepared.layout
    step.graph.lint()
    trained = [bucket for bucket in layout.buckets if bucket.trainable]
    assert len(plan.reduces) == len(trained)
    assert sum(node.target in ops.REDUCTIONS for node in step.calls()) == (len(trained) if sample.num_ranks > 1 else 0)
    assert len(calls(step, ops.release)) == len(plan.gathers)
    _check_writes(step, {bucket.index for bucket in trained})
    live = liveness(step, on_cpu=True)
    assert live.peak_bytes >= live.persistent_bytes > 0
    assert all(0 <= live.after[node] <= live.during[node] <= live.peak_bytes for node in step.calls())
    emitted = emit(step, cut(step), live, "")
    compile(emitted.source, "<emitted>", "exec")


def _check_writes(step: StepGraph, trained: set[int]) -> None:
    """Trained buckets are written, each by one operator of its update, and no other parameter is."""
    writes = [
        (placeholder(target), node)
        for node in step.calls()
        for target in mutated_inputs(node)
        if target.op == "placeholder" and placeholder(target).role in (Role.FULL, Role.SHARD, Role.MASTER)
    ]
    assert {what.bucket for what, _ in writes} == trained
    updates = Counter((what.bucket, what.role) for what, node in writes if node.target not in ops.EVENTS)
    assert set(updates.values()) == {1}
