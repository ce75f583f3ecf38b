"""Own Triton kernels on a GPU give what they give interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.compiled.kernels.interpreted import launch, trained
from tests.compiled.kernels.test_norms import DTYPES
from tests.compiled.kernels.test_softmax import IGNORED
from tests.compiled.kernels.test_softmax import check as check_softmax
from zerofx.ir.op_kernels import quantise
from zerofx.ir.op_kernels.norms import ROW, square_sum
from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    logits = (8 * torch.randn(33, 5001, device="cuda")).to(dtype)
    target = torch.randint(5001, (33,), device="cuda")
    target[::5] = IGNORED
    with torch.device("cuda"):
        check_softmax(launch, logits, target, [0, 4100, 5001])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_have_the_same_bits_again(dtype: torch.dtype) -> None:
    values = torch.randn(1100 * ROW + 16, device="cuda").to(dtype)
    found, _ = launch("norms", "square_sum", values)
    torch.testing.assert_close(found, square_sum(values), rtol=2e-6, atol=0.0)
    assert all(torch.equal(launch("norms", "square_sum", values)[0], found) for _ in range(3))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rounded_bits_are_those_of_aten(encoding: str) -> None:
    values = torch.randn(3 * 2 * 5 * BLOCK).bfloat16()
    packed = quantise.quantise(values, 3, encoding, 2)
    found, _ = launch("wire", "quantise", values.cuda(), 3, encoding, 2)
    assert torch.equal(found.cpu(), packed)
    for name in ("dequantise", "dequantise_sum"):
        expected = getattr(quantise, name)(packed, 3, encoding, torch.bfloat16)
        assert torch.equal(launch("wire", name, packed.cuda(), 3, encoding, torch.bfloat16)[0].cpu(), expected)


def test_updates_are_those_of_aten() -> None:
    with torch.device("cuda"):
        for _, expected, found in trained("adamw", True, torch.bfloat16, 100_003, 3):
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
