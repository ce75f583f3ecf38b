"""The optimizer's own operators, on each bucket's slice, as soon as its gradient is reduced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from tests.lib.graphs import Prepared, TwoBlocks, prepare
from tests.lib.runs.whole_optimizers import ByNorms
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Role, placeholder, tensor

aten = torch.ops.aten


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def _writes(prepared: Prepared, target: fx.Node) -> list[fx.Node]:
    return [node for node in prepared.step.calls() if target in mutated_inputs(node) and node.target not in ops.EVENTS]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_bucket_is_updated(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage).changes("update"))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_whole_parameters_are_updated_by_their_owners(precision: str | None, golden: Callable[..., None]) -> None:
    model = TwoBlocks()
    golden(prepare(model, optimizer=ByNorms(model.parameters()), precision=precision).changes("update"))


def test_the_operators_are_the_optimizers_own_in_their_order() -> None:
    model = TwoBlocks()
    prepared = prepare(model, optimizer=_adamw(model), num_ranks=1).run("update")
    (first, *_) = prepared.programs.values()
    wanted = [node.target for node in first.graph.nodes if node.op == "call_function"]
    (state,) = [n for n in prepared.step.placeholders(Role.STATE) if n.name == "exp_avg_0"]
    targets = [node.target for node in prepared.step.calls()]
    start = targets.index(wanted[0])
    found = [target for target in targets[start:] if target in wanted][: len(wanted)]
    assert found == wanted
    assert tensor(state).numel() == prepared.layout.buckets[0].shard_numel


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_update_of_a_replicated_bucket_comes_after_its_last_reader(stage: int) -> None:
    prepared = prepare(stage=stage).run("update")
    order = prepared.step.positions()
    for full in prepared.step.placeholders(Role.FULL):
        what = placeholder(full)
        targets = [n for n in prepared.step.placeholders() if n.name in (full.name, f"shard_{what.bucket}")]
        writes = [write for target in targets for write in _writes(prepared, target)]
        reads = [node for node in consumers(full) if node not in writes and node.target not in ops.EVENTS]
        assert writes and max(order[read] for read in reads) < min(order[write] for write in writes)


def test_in_bf16_the_fp32_master_is_updated_and_cast_into_the_slice() -> None:
    prepared = prepare(precision="bf16").run("update")
    for master in prepared.step.placeholders(Role.MASTER):
        (update,) = _writes(prepared, master)
        gradient = update.args[1]
        assert isinstance(gradient, fx.Node) and tensor(gradient).dtype == torch.float32
        (copy,) = [node for node in master.users if node.target is aten.copy_.default]
        assert isinstance(copy.args[0], fx.Node) and placeholder(copy.args[0]).role is Role.SHARD
