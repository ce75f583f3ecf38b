"""The table of what there is for CPUs alone: documented, where it says, and each with a switch that works."""

from __future__ import annotations

from pathlib import Path

from tests.lib.graphs import settings
from zerofx.codegen.cpu.extras import CPU_KERNELS, EXTRAS, OPTIONAL
from zerofx.codegen.kernels.table import check_kernels
from zerofx.pipeline import check_disabled

_ROOT = Path(__file__).resolve().parents[3]


def test_every_extra_is_where_the_table_says_and_in_the_documentation() -> None:
    text = (_ROOT / "docs" / "kernels.md").read_text()
    for extra in EXTRAS:
        assert (_ROOT / extra.where).exists()
        cells = (f"`{extra.name}`", extra.does, extra.instead_of, f"`{extra.where}`", f"`{extra.switch}`")
        assert f"| {' | '.join(cells)} |" in text


def test_every_extra_can_be_switched_off() -> None:
    assert {extra.name for extra in EXTRAS} == CPU_KERNELS | OPTIONAL
    check_kernels(CPU_KERNELS)
    check_disabled(settings(disable=OPTIONAL))
