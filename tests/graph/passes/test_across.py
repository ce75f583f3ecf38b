"""Sums of slices cross replicas: the second hop of a reduction, and the way back of what is updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lib.graphs import calls, prepare
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Role
from zerofx.passes.verify import verify
from zerofx.scheduler.plan.mesh import Mesh

HYBRID = Mesh(replicate=2, shard=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_sums_of_slices_are_summed_again(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage, mesh=HYBRID).changes("across"))


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_are_updated_and_rise(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage, mesh=HYBRID).changes("update"))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", [HYBRID, Mesh(replicate=2), Mesh(shard=2)], ids=str)
def test_every_stage_keeps_the_rules(mesh: Mesh, stage: int) -> None:
    for count in (1, 2):
        prepared = prepare(stage=stage, mesh=mesh, num_micro_batches=count, prefetch=count)
        prepared.run_pipeline(verify=2)
        reductions = calls(prepared.step, ops.reduce_scatter)
        crossing = [node for node in reductions if node.kwargs.get("over") == "replicate"]
        assert len(crossing) == (len(prepared.plan.reduces) if mesh.replicate > 1 and stage > 0 else 0)
        assert bool(list(prepared.step.placeholders(Role.PART))) == (mesh.replicate > 1 and stage > 0)


def test_a_hop_that_is_lost_or_not_decided_is_found() -> None:
    prepared = prepare(mesh=HYBRID)
    undecided = replace(prepared.plan, reduces=tuple(replace(r, crossed_after="") for r in prepared.plan.reduces))
    with pytest.raises(PlanError, match="expected a decision about gradients across replicas"):
        replace(prepared, plan=undecided).run_pipeline()
    prepared = prepare(mesh=HYBRID)
    prepared.run_pipeline()
    cross = next(node for node in prepared.step.calls() if node.name.startswith("cross_"))
    cross.target = ops.all_gather
    with pytest.raises(InvalidGraphError, match="sums across replicas"):
        verify(prepared.step, "a test", prepared.plan)
