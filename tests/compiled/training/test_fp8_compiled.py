"""Products in fp8 in compiled regions: the values of the eager backend within rounding, and the planned peak."""

from __future__ import annotations

import pytest
import torch

from tests.lib import compiling
from tests.lib.runs.fp8 import RECIPES, batches, build, compile_in_fp8
from zerofx.choices import Fp8Recipe

pytestmark = compiling.trainings


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_regions_scale_and_cast_as_the_eager_backend_does(recipe: Fp8Recipe) -> None:
    losses = []
    for backend in ("eager", "inductor"):
        step = compile_in_fp8("gpt", recipe, build("gpt"), backend=backend)
        losses.append(torch.stack([step(*args).clone() for args, _ in batches("gpt", 0, 3)]))
        batch = tuple(tensor.clone() for tensor in next(batches("gpt", 0, 1))[0])
        assert step.measure(*batch).peak_bytes == step.plan.peak_bytes
        step.close()
    assert torch.allclose(losses[0], losses[1], rtol=0.02)
