"""What the peak is made of: tensors that add up to it, with their layers and lines."""

from __future__ import annotations

import pytest

from tests.lib.lowered import lowered
from zerofx.report.peak import peak_of
from zerofx.scheduler.cost.categories import peak_memory


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (1, 2), (3, 2)])
def test_layers_add_up_to_the_peak(stage: int, num_ranks: int, fused: bool) -> None:
    step = lowered(stage=stage, num_ranks=num_ranks, fused=fused)
    live = step.simulation.live
    peak = peak_of(step.graph, live, step.plan)
    by_category: dict[str, int] = {}
    for sizes in peak.layers.values():
        for category, size in sizes.items():
            by_category[category] = by_category.get(category, 0) + size
    assert by_category == peak_memory(step.graph, live)
    assert sum(by_category.values()) == live.peak_bytes


def test_the_largest_come_first_with_equal_ones_of_layers_together() -> None:
    step = lowered(12, stage=0, num_ranks=1)
    tensors = peak_of(step.graph, step.simulation.live, step.plan).tensors
    sizes = [tensor.num_bytes for tensor in tensors]
    assert sizes == sorted(sizes, reverse=True) and len(tensors) <= 10
    (parameters,) = [tensor for tensor in tensors if tensor.category == "parameters"]
    assert (parameters.layer, parameters.count) == ("layers.0 … head", 13)
    assert parameters.fate == "stays between steps"
    kept = [tensor for tensor in tensors if tensor.fate == "kept for backward"]
    assert kept and all(tensor.line.startswith("graphs.py, Block.forward: ") for tensor in kept)
