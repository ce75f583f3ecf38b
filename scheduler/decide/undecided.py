"""Plans before anything is decided: which captured graph, buckets and ranks they are for."""

from __future__ import annotations

from collections import Counter

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.text import target_name, type_name
from zerofx.scheduler.plan.facts import BucketSummary, GraphSummary
from zerofx.scheduler.plan.plan import Plan


def undecided(step: StepGraph, layout: BucketLayout, stage: int, precision: str | None, machine: str) -> Plan:
    """The plan for a captured graph on the machine of that name, without any decision."""
    return Plan(
        stage=stage,
        num_ranks=layout.num_ranks,
        precision=precision,
        machine=machine,
        graph=step.fingerprint(),
        buckets=tuple(summarise(bucket) for bucket in layout.buckets),
        gathers=(),
        reduces=(),
        slices=step.slices,
        shardings=step.shardings,
        overlaps=step.overlaps,
        products=step.products,
        num_micro_batches=step.num_micro_batches,
        by_layer=step.by_layer,
        replicate=layout.mesh.replicate,
        model=layout.mesh.model,
        pipe=layout.mesh.pipe,
        stage_cuts=step.pipe.cuts if step.pipe is not None else (),
        pipe_stage=step.pipe.number if step.pipe is not None else 0,
        weights_lag=step.pipe.weights_lag if step.pipe is not None else None,
        draws_together=step.pipe is not None and step.pipe.draws,
        summary=summarise_graph(step),
    )


def summarise_graph(step: StepGraph) -> GraphSummary:
    """Summary of a plan's captured graph, to tell it from others in words."""
    placeholders = {
        f"{placeholder(node).role} {placeholder(node).name}": type_name(node) for node in step.placeholders()
    }
    operators = Counter(target_name(node) for node in step.calls())
    return GraphSummary(placeholders, dict(sorted(operators.items())))


def summarise(bucket: Bucket) -> BucketSummary:
    """The part of a bucket that a plan records."""
    return BucketSummary(
        name=bucket.name,
        group=bucket.group,
        num_parameters=bucket.num_parameters,
        shard_numel=bucket.shard_numel,
        dtype=str(bucket.dtype),
        compute_dtype=str(bucket.compute_dtype),
        gathered_over=bucket.gathered_over,
        states_over=bucket.states_over,
        reduce_dtype=None if bucket.reduce_dtype == bucket.compute_dtype else str(bucket.reduce_dtype),
        state_dtype=None if bucket.state_dtype == bucket.dtype else str(bucket.state_dtype),
        lent=bucket.is_lent,
    )
