"""Batches of any length, compiled: losses without padding, and a second start that loads what the first has built."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import zerofx
from tests.lib import compiling
from tests.lib.users import adamw, eager_step, ids, tiny

LENGTHS = (8, 16)

pytestmark = compiling.trainings


@pytest.mark.slow
def test_losses_are_those_of_eager_mode_and_a_second_start_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    kept: list[set[str]] = []
    for _ in range(2):
        model = tiny()
        plain = copy.deepcopy(model)
        optimizer = adamw(plain)
        step = zerofx.compile(model, adamw(model), lengths=LENGTHS)
        step.prepare(ids(0, 2, 5), labels=ids(1, 2, 5))
        written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert [(rung.length, rung.num_steps) for rung in step.rungs] == [(8, 0), (16, 0)]
        for seed, (rows, length) in enumerate([(2, 5), (2, 16), (1, 11), (2, 8)]):
            x, y = ids(seed, rows, length), ids(-seed, rows, length)
            loss = step(x, labels=y)
            assert torch.allclose(loss, eager_step(plain, optimizer, x, labels=y), rtol=1e-5, atol=0)
        assert [(rung.length, rung.samples, rung.num_steps) for rung in step.rungs] == [(8, 2, 2), (16, 2, 2)]
        step.close()
        kept.append(written)
    assert len([name for name in kept[0] if name.startswith("step-")]) == 2
    assert kept[0] == kept[1]
