"""Gathers of casts to fp8: what stands in the graph for them, and of which buckets there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn, randn

import zerofx
from tests.lib.graphs import number_values
from tests.lib.runs.fp8 import fast_in_fp8, optimizer_of
from zerofx.driver.opt import phase_passes, rewrite
from zerofx.driver.plan_only import graph_to_save
from zerofx.errors import PlanError
from zerofx.scheduler.cost.machine import Link

SLOW = replace(fast_in_fp8(), intra_node=Link(bandwidth=1.0, latency=1e-6))  # so that all waits for gathers


class Net(nn.Module):
    """Two products, and a norm, which is gathered as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(F.gelu(self.norm(self.up(x)))).square().mean()
        return loss


def _plan() -> tuple[dict[str, Any], zerofx.Plan]:
    model, batch = Net(), (randn(16, 32),)
    given: dict[str, Any] = {"machine": SLOW, "backend": "eager"}
    low = zerofx.Precision(fp8="rowwise")
    plan = zerofx.plan(model, optimizer_of(model), batch, world_size=2, precision=low, **given).plan
    saved = graph_to_save(model, optimizer_of(model), batch, plan, **given)
    return {"saved": saved}, plan


def _texts(saved: Any, plan: zerofx.Plan) -> dict[str, str]:
    texts: dict[str, str] = {}
    passes = [*phase_passes("prepare", plan, saved), *phase_passes("plan", plan, saved)]
    rewrite(saved, passes, plan, lambda name, text, _: texts.update({name: text}))
    return texts


def test_a_weight_is_cast_once_and_gathered_for_each_of_its_readers(golden: Callable[..., None]) -> None:
    given, plan = _plan()
    golden(number_values(_texts(given["saved"], plan)["cast_gathers"]))


def test_what_is_read_otherwise_is_refused() -> None:
    given, plan = _plan()
    assert not all(gather.in_fp8 for gather in plan.gathers)
    wrong = replace(plan, gathers=tuple(replace(gather, in_fp8=True) for gather in plan.gathers))
    with pytest.raises(PlanError, match="expected buckets of which casts to fp8 alone are read"):
        _texts(given["saved"], wrong)
