"""Plans whose other decisions are made by hand, with gathers and reductions decided for the graph that they lead to."""

from __future__ import annotations

from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import Recompute
from zerofx.passes.divide import Divide
from zerofx.passes.tile import Tile
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.plan.plan import Plan


def decided(step: StepGraph, layout: BucketLayout, plan: Plan, prefetch: int = 1) -> Plan:
    """``plan`` with gathers and reductions decided, once what it tiles and recomputes is so in a copy of ``step``."""
    carried_out = step.clone()
    for graph_pass in (Tile(), Divide(), Recompute()):
        graph_pass.run(carried_out, plan)
    return decide(carried_out, layout, plan, PolicyOptions(prefetch))
