"""No loop over a set decides an order: sets of nodes, and of strings, have another one in each rank's process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tests.lib.checkout import ROOT

FOLDERS = ("passes", "scheduler", "codegen", "zerofx/driver", "zerofx/ir", "zerofx/lowering")
_SETS = {"set", "frozenset"}
_COMBINE = {"union", "intersection", "difference", "symmetric_difference"}
_ORDERED = {"list", "tuple", "enumerate", "next", "dict", "fromkeys", "extend", "join"}
_ORDERLESS = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum", "update", "union", "isdisjoint"}


def _name(node: ast.AST | None) -> str:
    """The last name of what is called, read or annotated: ``set`` of ``set[fx.Node]()``."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_set(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return _name(node) in _SETS | _COMBINE
    if isinstance(node, ast.BinOp):
        return _is_set(node.left, names) or _is_set(node.right, names)
    if isinstance(node, ast.Attribute):
        return _name(node.value) == "self" and node.attr in names
    return isinstance(node, ast.Name) and node.id in names


def _names_of_sets(scope: ast.AST) -> set[str]:
    """The variables, parameters and own attributes that are set to a set, or said to be one."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.AnnAssign | ast.arg) and _name(node.annotation) in _SETS:
            names.add(node.arg if isinstance(node, ast.arg) else _name(node.target))
        elif isinstance(node, ast.Assign) and _is_set(node.value, names):
            names.update(map(_name, node.targets))
    return names - {""}


def _loops(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression whose order is kept: of loops, comprehensions and calls that read one by one."""
    orderless: set[Any] = set()  # generators that are handed to what has no order
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in _ORDERLESS:
            orderless.update(node.args)
        elif isinstance(node, ast.Set):
            orderless.update(each.value for each in node.elts if isinstance(each, ast.Starred))
        elif isinstance(node, ast.Call) and _name(node.func) in _ORDERED:
            yield from node.args[-1:]
        elif isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and node not in orderless:
            yield from (generator.iter for generator in node.generators)


def _in_order_of_a_set(source: str) -> list[int]:
    """The lines of ``source`` where an order comes from a set."""
    tree = ast.parse(source)
    attributes = {
        node.target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and _name(node.annotation) in _SETS
    }
    lines: set[int] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = _names_of_sets(function) | attributes
            lines.update(loop.lineno for loop in _loops(function) if _is_set(loop, names))
    return sorted(lines)


def test_no_order_comes_from_a_set() -> None:
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).resolve().rglob("*.py"))
    loops = {str(file.relative_to(ROOT)): _in_order_of_a_set(file.read_text(encoding="utf-8")) for file in files}
    assert not {file: lines for file, lines in loops.items() if lines}, "a list or a dict has one order on all ranks"


def test_the_rule_sees_orders_of_sets() -> None:
    source = """
def write(nodes):
    groups = {node for node in nodes if node.users}
    for node in groups:
        node.erase()
    sizes = [node.size for node in groups | set(nodes)]
    return sorted(groups), any(node.users for node in groups), dict.fromkeys(groups), sizes
"""
    assert _in_order_of_a_set(source) == [4, 6, 7]
