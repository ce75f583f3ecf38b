"""A loss over runs of classes: kernel and reference alike give torch's cross-entropy and its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compiled.kernels.conftest import Interpret
from tests.compiled.kernels.interpreted import launch
from zerofx.ir.op_kernels import softmax

IGNORED = -100


def reference(_: str, name: str, *args: Any) -> tuple[Any, list[Any]]:
    copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    return getattr(softmax, name)(*copies), copies


def by_classes(run: Any, logits: Tensor, target: Tensor, bounds: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """The losses of all rows and the gradient of their logits, from the classes between ``bounds``."""
    stats, parts = None, []
    runs = list(itertools.pairwise(bounds))
    for start, end in runs:
        stats, _ = run("softmax", "softmax_chunk", logits[:, start:end].contiguous(), target, start, stats)
    assert stats is not None
    largest, total, picked = stats
    log_sums = total.log() + largest
    for start, end in runs:
        args = (logits[:, start:end].contiguous(), target, start, log_sums, torch.tensor(scale), IGNORED)
        parts.append(run("softmax", "softmax_gradient", *args)[1][0])
    return log_sums - picked, torch.cat(parts, 1)


def check(run: Any, logits: Tensor, target: Tensor, bounds: list[int], scale: float = 0.25) -> None:
    whole = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(whole, target, reduction="none", ignore_index=IGNORED)
    (expected.sum() * scale).backward()
    losses, gradient = by_classes(run, logits, target, bounds, scale)
    kept = target != IGNORED
    torch.testing.assert_close(losses[kept], expected.detach()[kept], rtol=2e-6, atol=2e-6)
    assert whole.grad is not None and gradient.dtype == logits.dtype
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    rtol, atol = (2**-7, 1e-30) if logits.dtype == torch.bfloat16 else (2e-5, 2e-7)
    torch.testing.assert_close(gradient, whole.grad.to(logits.dtype), rtol=rtol, atol=max(atol, 1e-7))


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 5),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
    kernel=st.booleans(),
)
def test_losses_and_gradients_are_those_of_cross_entropy(
    interpret: Interpret, rows: int, widths: list[int], dtype: torch.dtype, seed: int, kernel: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bounds = [0, *torch.tensor(widths).cumsum(0).tolist()]
    logits = (8 * torch.randn(rows, bounds[-1], generator=generator)).to(dtype)
    target = torch.randint(bounds[-1], (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.2] = IGNORED
    check((lambda *args: interpret(launch, *args)) if kernel else reference, logits, target, bounds)


def test_a_row_of_more_classes_than_a_program_reads_at_a_time(interpret: Interpret) -> None:
    logits, target = torch.randn(2, 5001), torch.tensor([4999, 17])
    check(lambda *args: interpret(launch, *args), logits, target, [0, 4100, 5001])


@pytest.mark.parametrize("kernel", [True, False])
def test_classes_that_are_ruled_out_and_rows_that_are_ignored(interpret: Interpret, kernel: bool) -> None:
    run = (lambda *args: interpret(launch, *args)) if kernel else reference
    logits = torch.randn(3, 12)
    logits[0, :6] = -torch.inf
    logits[2] = torch.nan
    target = torch.tensor([7, 3, IGNORED])
    losses, gradient = by_classes(run, logits, target, [0, 5, 12], 1.0)
    whole = logits[:2].clone().requires_grad_()
    expected = F.cross_entropy(whole, target[:2], reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses[:2], expected.detach())
    assert whole.grad is not None
    torch.testing.assert_close(gradient[:2], whole.grad)
    assert torch.equal(gradient[2], torch.zeros(12))
