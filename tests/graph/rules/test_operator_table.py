"""One place says what is known of an operator: no other file has a list of ATen's names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerofx.ir import ops
from zerofx.ir.operators.operator import Inductor, Operator, Traffic
from zerofx.ir.operators.table import TABLE, aten_entries, facts_of
from zerofx.torch_private.versions import TORCH

ROOT = Path(__file__).parents[3]
aten = torch.ops.aten
GONE = {"cholesky": (2, 14)}  # operators of ATen that torch has no more, each from a version on
OPERATOR = r"(torch\.ops\.|_)?aten\.\w+\.\w+"

# Lists that hold no fact about operators, but what one rewrite makes of a few.
ELSEWHERE = {
    "codegen/inductor/decompositions.py": "what regions have in the place of Inductor's decompositions, as functions",
    "codegen/inductor/mends.py": "what regions have in the place of operators that Inductor gets wrong, as functions",
    "codegen/inductor/region_rewrites.py": "which argument of two operators is copied, for one rewrite",
}


def lists_of_operators(path: Path) -> Iterator[int]:
    """Lines that list operators of ATen's, or name one in words; a graph's pattern may compare with a few."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compared = {one for node in ast.walk(tree) if isinstance(node, ast.Compare) for one in node.comparators}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            is_list = any(key is not None and re.fullmatch(OPERATOR, ast.unparse(key)) for key in node.keys)
        elif isinstance(node, ast.Set | ast.List | ast.Tuple) and node not in compared:
            is_list = sum(re.fullmatch(OPERATOR, ast.unparse(one)) is not None for one in node.elts) > 1
        else:
            is_list = isinstance(node, ast.Constant) and re.fullmatch(r"aten::\w+", str(node.value)) is not None
        if is_list and isinstance(node, ast.expr):
            yield node.lineno


@pytest.mark.parametrize("folder", ["scheduler", "passes", "codegen"])
def test_what_is_known_of_operators_stands_in_the_table_alone(folder: str) -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / folder).rglob("*.py")}
    lines = {name: list(lists_of_operators(path)) for name, path in files.items() if name not in ELSEWHERE}
    assert {name: found for name, found in lines.items() if found} == {}


@pytest.mark.parametrize("folder", ["scheduler/cost", "scheduler/decide", "scheduler/search"])
def test_costs_and_decisions_name_no_operator(folder: str) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"\baten(::\w|\.\w+\.)", text)] == []


def test_every_entry_is_of_an_operator() -> None:
    of_aten = [name for name in TABLE if "::" not in name and not name.endswith("*")]
    for name, version in GONE.items():
        assert name in of_aten and hasattr(aten, name) == (version > TORCH)
    of_aten = [name for name in of_aten if hasattr(aten, name) or name not in GONE]
    with_prefix = {key for key, _ in zip(of_aten, aten_entries(), strict=False)}
    assert all(hasattr(aten, name.partition(".")[0]) for name in of_aten) and len(with_prefix) > 200
    for name in of_aten:
        packet, _, overload = name.partition(".")
        assert not overload or overload in getattr(aten, packet).overloads()
    assert all(hasattr(torch.ops.zerofx, name[8:]) for name in TABLE if name.startswith("zerofx::"))


def test_an_overload_has_its_own_entry_or_that_of_its_name() -> None:
    assert facts_of(aten.sum.dim_IntList).rows is not None and facts_of(aten.sum.default).rows is None
    assert facts_of(aten.view.dtype) == Operator()
    assert facts_of(aten.linalg_qr.default).is_cubic and not facts_of(aten.relu.default).is_cubic
    assert facts_of(torch.relu) == Operator()


def test_what_torch_tags_as_pointwise_is_a_loop() -> None:
    for operator in (aten.mul.Tensor, aten.max.other, aten.gelu.default):
        assert facts_of(operator).is_pointwise and facts_of(operator).inductor is Inductor.LOOP


def test_operators_that_give_what_memory_holds_read_nothing() -> None:
    assert facts_of(aten.empty_like.default).traffic is Traffic.ALLOCATES
    assert facts_of(ops.quantise).inside is not None
