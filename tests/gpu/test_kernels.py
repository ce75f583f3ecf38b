"""Own Triton kernels on a GPU give what they give interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.compiled.kernels.interpreted import launch, trained
from tests.compiled.kernels.test_softmax import IGNORED
from tests.compiled.kernels.test_softmax import check as check_softmax

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    logits = (8 * torch.randn(33, 5001, device="cuda")).to(dtype)
    target = torch.randint(5001, (33,), device="cuda")
    target[::5] = IGNORED
    with torch.device("cuda"):
        check_softmax(launch, logits, target, [0, 4100, 5001])


def test_updates_are_those_of_aten() -> None:
    with torch.device("cuda"):
        for _, expected, found in trained("adamw", True, torch.bfloat16, 100_003, 3):
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
