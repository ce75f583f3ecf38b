"""Keep on disk how ranks share a computation: deciding it takes longer than making most plans.

It follows from the captured graph, the mesh, the machine and the requested placements; if layouts are simulated to
choose among them, also from everything that a plan follows from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from zerofx.capture.trace_settings import trace_settings
from zerofx.disk.cache import DiskCache, key_of
from zerofx.driver.prepared import Request
from zerofx.ir.canonical import graph_parts
from zerofx.ir.graph import StepGraph
from zerofx.json_format import typed
from zerofx.scheduler.plan.decisions import OverlapDecision, ShardingDecision
from zerofx.torch_private.profiler import is_profiling

Decision = TypeVar("Decision", ShardingDecision, OverlapDecision)


def decide_with_cache(
    request: Request, step: StepGraph, kind: type[Decision], decide: Callable[[], tuple[Decision, ...]], *said: str
) -> tuple[Decision, ...]:
    """The result of ``decide()`` for the captured ``step``, from the cache if an earlier run decided it; ``said`` is
    everything else it follows from."""
    cache = DiskCache(request.settings.cache_dir)
    if cache.folder is None:
        return decide()
    key = key_of("sharing", (
        kind.__name__, *graph_parts(step), repr(request.mesh), repr(request.machine), *trace_settings(), *said,
    ))  # fmt: skip
    decisions = cache.read_as(key, lambda text: from_json(kind, text))
    if decisions is None:
        decisions = decide()
        if not is_profiling():  # as of plans
            cache.write(key, to_json(decisions))
    return decisions


def to_json(decisions: Sequence[ShardingDecision | OverlapDecision]) -> str:
    """Decisions as JSON."""
    return json.dumps([asdict(decision) for decision in decisions])


def from_json(kind: type[Decision], text: str) -> tuple[Decision, ...]:
    """The decisions that ``to_json`` wrote as ``text``."""
    return tuple(typed(kind, item) for item in json.loads(text))
