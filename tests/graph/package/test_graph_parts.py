"""What is kept for a graph is found again for an equal one alone."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.lib.graphs import prepare
from zerofx.ir.canonical import graph_parts
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.returned import Returned
from zerofx.ir.serialise import same_graph
from zerofx.scheduler.plan.decisions import ProductDecision, ShardingDecision, TileDecision

OTHER: dict[str, Any] = {
    "device": torch.device("meta"),
    "parameters": (),
    "units": frozenset({"other"}),
    "mutation_names": ["other"],
    "gradient_names": ["other"],
    "num_micro_batches": 7,
    "by_layer": True,
    "num_before": 3,
    "slices": (TileDecision("weight", 2, 8, "few bytes"),),
    "shardings": (ShardingDecision("mm", ("R",), ("R",)),),
    "overlaps": (("add", "mm"),),
    "products": (ProductDecision("mm", "weight", "input", "weight", True, "faster"),),
    "cut_pieces": frozenset({"other"}),
    "num_extras": 7,
    "returned": Returned(whole=frozenset({0})),
    "guarded": True,
    "pipe": PipeStage(1, 2, ("mm",)),
}
OF_PASSES = {"reduced", "clipping", "unscaling", "layer_squares", "kept_gradients"}  # a captured graph has none of them
OF_GRAPH = {"graph", "constants", "fakes"}  # its nodes are texts; values of constants are compared, and fakes follow


def test_every_field_of_a_captured_graph_is_thought_of() -> None:
    assert OTHER.keys() | OF_PASSES | OF_GRAPH == {field.name for field in fields(StepGraph)}


@pytest.mark.parametrize("name", OTHER)
def test_a_graph_with_another_field_is_another(name: str) -> None:
    step = prepare().step
    changed = replace(step, **{name: OTHER[name]})
    assert graph_parts(changed) != graph_parts(step) and not same_graph(changed, step)
    assert same_graph(step.clone(), step)
