"""Activations of a layer on ranks that share it, against all rows of the table of Korthikanti et al. (2205.05198)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.activation_table import SEQUENCE, SHAPES, TECHNIQUES, Technique, measured, table
from tests.lib.formulas import Transformer

QUICK = {("TP", 8), ("TP + SP", 8), ("TP + SP + selective", 2)}


def _cases() -> list[Any]:
    pairs = [(technique, num_ranks) for technique in TECHNIQUES for num_ranks in (1, 2, 4, 8)]
    return [
        pytest.param(
            *pair, marks=[] if (pair[0].name, pair[1]) in QUICK else pytest.mark.slow, id=f"{pair[0].name}, {pair[1]}"
        )
        for pair in pairs
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("technique", "num_ranks"), _cases())
def test_a_layer_keeps_what_the_papers_table_counts(technique: Technique, num_ranks: int) -> None:
    shape = SHAPES["175B"]
    model = Transformer(3, shape.hidden, shape.heads, SEQUENCE)
    expected = model.layer_bytes(
        shape.batch, tensor_parallel=num_ranks if technique.parallel else 1,
        sequence_parallel=technique.sequence_parallel, recompute=technique.again,
    )  # fmt: skip
    sbh, scores = SEQUENCE * shape.batch * shape.hidden, 5 * shape.heads * SEQUENCE**2 * shape.batch
    assert technique.num_bytes(sbh, scores, num_ranks) == expected
    found = measured(shape, technique, num_ranks)
    # Mean and 1 / deviation of each token for two norms, of two bytes: the paper leaves them out as small.
    parts = num_ranks if technique.sequence_parallel else 1
    assert found.statistics == (0 if technique.again == "full" else 2 * 2 * 2 * SEQUENCE * shape.batch // parts)
    # Masks that the paper draws again from a saved state; a plan never draws anything twice.
    mask = shape.heads * SEQUENCE**2 * shape.batch // num_ranks
    masks = {"none": 0, "selective": mask, "full": mask + 2 * sbh}[technique.again]
    assert found.total == expected + found.statistics + masks


@pytest.mark.slow
def test_the_table_is_printed_with_what_is_beyond_the_paper() -> None:
    lines = table("175B", (8,)).splitlines()
    assert len(lines) == 2 + len(TECHNIQUES)
    assert "| 552.0 MiB | 552.0 MiB | 16.0 KiB" in lines[3] and "| 342.0 MiB | 342.0 MiB | 2.0 KiB" in lines[4]
