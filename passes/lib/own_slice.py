"""Where a bucket's reduced gradient is this rank's alone."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket
from zerofx.ir.graph import StepGraph


def own_slice(step: StepGraph, bucket: Bucket) -> fx.Node:
    """What no other rank has of a bucket's reduced gradient, which at stage 0 is gathered from all ranks again."""
    own = step.reduced[bucket.index]
    while isinstance(gather := own.args[0], fx.Node) and gather.target is ops.all_gather_into:
        assert isinstance(gather.args[1], fx.Node)
        own = gather.args[1]
    return own
