"""Which kernels a step uses."""

from __future__ import annotations

import pytest
import torch

from tests.lib.checkout import ROOT
from zerofx.codegen.cpu.extras import ATTENTION, PRODUCTS
from zerofx.codegen.kernels.table import KERNELS, LOSS, UPDATE, check_kernels, kernels_in_use
from zerofx.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DOCS = ROOT / "docs"


def test_a_cpu_uses_its_own_and_none_of_tritons_unless_they_are_interpreted() -> None:
    assert kernels_in_use(None, CPU) - {PRODUCTS} == {ATTENTION}
    assert kernels_in_use(frozenset({UPDATE}), CPU) == frozenset()
    assert kernels_in_use(frozenset({UPDATE, ATTENTION}), CPU) == {ATTENTION}


@pytest.mark.parametrize(
    ("name", "has_avx512", "is_used"),
    [
        ("AMD EPYC 9654 96-Core Processor", True, True),
        ("AMD EPYC 7763", False, False),
        ("Intel(R) Xeon(R)", True, False),
    ],
)
def test_products_are_taken_from_a_blas_that_does_not_use_all_vectors(
    name: str, has_avx512: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name, "avx512_f": has_avx512})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert (PRODUCTS in kernels_in_use(None, CPU)) == is_used
    assert PRODUCTS in kernels_in_use(frozenset({PRODUCTS}), CPU)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert PRODUCTS not in kernels_in_use(None, CPU) | kernels_in_use(frozenset({PRODUCTS}), CPU)


def test_defaults_and_names() -> None:
    pytest.importorskip("triton")
    assert kernels_in_use(None, CUDA) == {UPDATE, LOSS}
    assert kernels_in_use(frozenset({UPDATE, ATTENTION}), CUDA) == {UPDATE}
    assert kernels_in_use(frozenset(), CUDA) == frozenset()


def test_an_unknown_kernel_is_refused() -> None:
    check_kernels(None)
    check_kernels(frozenset({UPDATE}))
    with pytest.raises(UsageError, match=r"attention, loss, products, update.*softmax"):
        check_kernels(frozenset({UPDATE, "softmax"}))


def test_the_documentation_has_the_table() -> None:
    text = (DOCS / "kernels.md").read_text()
    for kernel in KERNELS:
        used = "on" if kernel.is_default else "off"
        cells = (f"`{kernel.name}`", kernel.does, kernel.instead_of, f"{used}: {kernel.reason}")
        assert f"| {' | '.join(cells)} |" in text
