"""The runs of a step's units."""

from __future__ import annotations

import pytest
import torch

from gpt import GPT
from tests.lib.models import adamw
from zerofx.driver.plan_only import capture_for_plans
from zerofx.ir.facts import Origin, Phase, set_origin
from zerofx.ir.micro_batches import borders, loop_bodies
from zerofx.optimizers import Optimizers
from zerofx.options import check_options
from zerofx.scheduler.cost.timeline import runs


@pytest.mark.captures
def test_no_run_goes_on_in_the_next_micro_batch() -> None:
    """Ranks may put their losses together last, which is forward, as is what the next micro-batch begins with."""
    model = GPT(vocab=19, dim=16, depth=1, heads=2, block=16)
    options = check_options(stage=3, machine="cpu", backend="eager", accumulate=4)
    batch = tuple(torch.randint(19, (2, 4, 16)))
    captured = capture_for_plans(model, Optimizers((adamw(model),)), batch, options, verbose=False)
    step = captured.captures.graph(4).clone()
    for border in borders(step):
        for node in (border.prev, border.next):
            set_origin(node, Origin("", Phase.FORWARD))
    bodies = loop_bodies(step)
    assert set(bodies.values()) == {0, 1, 2}
    assert all(bodies[run.first.name] == bodies[run.last.name] for run in runs(step, {}))
