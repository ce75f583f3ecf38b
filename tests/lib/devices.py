"""Cases on another device than the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.lib.models import Case


def moved(case: Case, device: torch.device) -> Case:
    """A case whose model and batches, drawn on the CPU, are on ``device``."""

    def batch(generator: torch.Generator) -> Any:
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, case.batch(generator))

    return replace(case, model=lambda: case.model().to(device), batch=batch)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add in one order, where torch has some: the backward of attention adds in any otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def products_in_tf32() -> Iterator[None]:
    """Products in float32 on the TF32 units of GPUs, asked for as torch now has it; it then refuses older ways."""
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before
