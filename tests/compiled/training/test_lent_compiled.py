"""Compiled steps that read models that other steps train."""

from __future__ import annotations

import pytest
import torch

from tests.lib import compiling
from tests.lib.runs.adversarial import batches, in_eager_mode, models, steps_of

pytestmark = compiling.trainings


@pytest.mark.slow
def test_compiled_steps_train_as_eager_mode_does() -> None:
    expected, *_ = in_eager_mode(4)
    step, other = steps_of(*models(), backend="inductor")
    found = []
    for real, noise in batches(4):
        found += [other(real, noise).clone(), step(noise).clone()]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=0)
    for one, batch in ((step, (noise,)), (other, (real, noise))):
        measured, predicted = one.measure(*batch, num_steps=1).peak_bytes["device"], one.plan.peak_bytes["device"]
        assert abs(measured - predicted) <= 0.01 * measured
