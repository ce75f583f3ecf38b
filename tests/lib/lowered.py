"""Lowered steps for reports: no process group, no kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from tests.lib.graphs import DIM, Block, prepare, target
from tests.lib.runs.offloads import offloading
from zerofx.lowering.lower import LoweredStep, lower
from zerofx.scheduler.cost.machine import Machine


class Deep(nn.Module):
    """`depth` equal layers and a head; the loss is the sum of the head's outputs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).sum()
        return loss


def lowered(
    depth: int = 6,
    *,
    stage: int = 3,
    num_ranks: int = 2,
    prefetch: int = 1,
    tiers: Sequence[str] = (),
    fused: bool = False,
) -> LoweredStep:
    """The step of ``Deep(depth)``, for reading; all that waits for backward does so in ``tiers`` in turn, if any.

    ``fused``: whether its regions are to be compiled.
    """
    return _lowered(depth, stage, num_ranks, prefetch, tuple(tiers), fused)


@functools.cache
def _lowered(depth: int, stage: int, num_ranks: int, prefetch: int, tiers: tuple[str, ...], fused: bool) -> LoweredStep:
    prepared = prepare(Deep(depth), stage=stage, num_ranks=num_ranks, prefetch=prefetch)
    plan = offloading(prepared, prepared.plan, tiers) if tiers else prepared.plan
    machine = Machine.named("cpu")
    compiled = replace(target(machine), compiles_regions=fused)
    return lower(prepared.step, plan, prepared.layout, prepared.programs, compiled)
