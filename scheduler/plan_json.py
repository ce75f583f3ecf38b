"""A plan as JSON, to be saved, compared between ranks, and read again."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zerofx.errors import PlanError
from zerofx.scheduler.decisions import (
    GatherDecision,
    GradientDecision,
    OffloadDecision,
    ParameterDecision,
    PieceDecision,
    RecomputeDecision,
    ReduceDecision,
    SliceDecision,
    StateDecision,
    TileDecision,
    WireDecision,
)
from zerofx.scheduler.plan_facts import BucketSummary, GraphSummary, Prediction

if TYPE_CHECKING:
    from zerofx.scheduler.plan import Plan

_FORMAT = 1
_PLAIN_FIELDS = (
    "stage", "num_ranks", "precision", "machine", "graph", "memory_budget", "num_micro_batches", "micro_batches_reason",
)  # fmt: skip
_LISTS: dict[str, type] = {
    "buckets": BucketSummary,
    "gathers": GatherDecision,
    "reduces": ReduceDecision,
    "recomputes": RecomputeDecision,
    "tiles": TileDecision,
    "slices": SliceDecision,
    "offloads": OffloadDecision,
    "states": StateDecision,
    "parameters": ParameterDecision,
    "gradients": GradientDecision,
}
# Entries that a plan has only where they say something.
_LEFT_OUT: dict[str, Any] = {"wire": "exact", "ranks_per_node": None, "wires": (), "pieces": (), "max_grad_norm": None}


def as_data(plan: Plan) -> dict[str, Any]:
    """All that a plan holds, as dicts, but for what most plans say nothing of: the wire, pieces, clipping, what tiles
    are of, where gathered sums are awaited."""
    data = asdict(plan)
    for reduce in data["reduces"]:
        if reduce["gathered_after"] == "":
            del reduce["gathered_after"]
    for tile in data["tiles"]:
        if tile["over"] == "rows":
            del tile["over"]
    for name, nothing in _LEFT_OUT.items():
        if data[name] == nothing:
            del data[name]
    if plan.prediction is not None and not plan.prediction.node_wire_bytes:
        del data["prediction"]["node_wire_bytes"]
    return data


def to_text(plan: Plan) -> str:
    """The plan as JSON text, which ``fields_of`` reads."""
    return json.dumps({"format": _FORMAT, **as_data(plan)}, indent=1, sort_keys=True)


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the plan that ``to_text`` has written.

    Raises:
        PlanError: the text is no plan of this format.
    """
    try:
        data = _LEFT_OUT | json.loads(text)
        if data["format"] != _FORMAT:
            raise PlanError(f"expected a plan of format {_FORMAT}; make the plan anew with this version of zerofx")
        prediction, summary = data["prediction"], data["summary"]
        return {
            **{name: data[name] for name in _PLAIN_FIELDS},
            **{name: tuple(_made(kind, one) for one in data[name]) for name, kind in _LISTS.items()},
            "extra_keeps": tuple(data["extra_keeps"]),
            "max_grad_norm": data["max_grad_norm"],
            "wire": data["wire"],
            "ranks_per_node": data["ranks_per_node"],
            "pieces": tuple(_made(PieceDecision, one) for one in data["pieces"]),
            "wires": tuple(_made(WireDecision, one) for one in data["wires"]),
            "prediction": Prediction(**prediction) if prediction else None,
            "summary": GraphSummary(**summary) if summary else None,
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise PlanError(f"expected the JSON of a zerofx plan, found something else: {error!r}") from error


def _made(kind: type, data: dict[str, Any]) -> Any:
    # JSON has lists where a decision has tuples.
    return kind(**{name: tuple(found) if isinstance(found, list) else found for name, found in data.items()})
