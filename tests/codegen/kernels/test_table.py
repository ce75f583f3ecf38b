"""Which kernels a step uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerofx.codegen.kernels.table import KERNELS, LOSS, UPDATE, check_kernels, kernels_in_use
from zerofx.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_a_cpu_uses_none_unless_triton_interprets_them() -> None:
    assert kernels_in_use(None, CPU) == frozenset()
    assert kernels_in_use(frozenset({UPDATE}), CPU) == frozenset()


def test_defaults_and_names() -> None:
    pytest.importorskip("triton")
    assert kernels_in_use(None, CUDA) == {kernel.name for kernel in KERNELS if kernel.is_default} == {UPDATE, LOSS}
    assert kernels_in_use(frozenset({UPDATE}), CUDA) == {UPDATE}
    assert kernels_in_use(frozenset(), CUDA) == frozenset()


def test_an_unknown_kernel_is_refused() -> None:
    check_kernels(None)
    check_kernels(frozenset({UPDATE}))
    with pytest.raises(UsageError, match=r"loss, update, wire.*softmax"):
        check_kernels(frozenset({UPDATE, "softmax"}))


def test_the_documentation_has_the_table() -> None:
    text = (DOCS / "kernels.md").read_text()
    for kernel in KERNELS:
        on = "on" if kernel.is_default else "off"
        assert f"| `{kernel.name}` | {kernel.does} | {kernel.instead_of} | {on}: {kernel.reason} |" in text
