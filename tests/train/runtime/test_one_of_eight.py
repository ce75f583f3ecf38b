"""One rank of eight, whose collectives run as on a GPU and move nothing, holds what is planned for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.compiled.cuda_stand_in.streams import on_streams
from tests.lib.fake_group import one_rank_of
from zerofx.runtime.measure.spans import SpanLog


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"accumulate": 2, "max_grad_norm": 1.0})],
    ids=["0", "1", "2", "3", "3, micro-batches, clipped"],
)
@pytest.mark.filterwarnings("ignore:.*not finite:zerofx.ZeroFXWarning")  # memory that nothing has been gathered into
def test_a_rank_of_eight_takes_what_is_planned(
    stage: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpanLog, "add_events", lambda *_: None)  # a CPU has no times of events
    model = GPT(vocab=512, dim=128, depth=3, heads=4, block=64)
    ids = torch.randint(0, 512, (8, 64))
    with on_streams() as streams, one_rank_of(8):
        step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), stage, backend="eager", **options)
        step(ids, ids)
        measured = step.measure(ids, ids, num_steps=1).peak_bytes["device"]
        planned = step.plan.peak_bytes["device"]
        step.close()
    assert not streams.races and step.plan.num_ranks == 8
    assert 0.99 * planned < measured <= planned
