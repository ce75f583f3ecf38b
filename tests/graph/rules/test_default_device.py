"""What zerofx makes for itself lies where it says, whatever ``torch.set_default_device`` was given."""

from __future__ import annotations

import ast
from typing import Final

from tests.lib.checkout import ROOT

_MAKERS: Final = frozenset(
    {
        "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
        "randperm", "scalar_tensor", "tensor", "zeros",
    }
)  # fmt: skip


def test_all_that_makes_a_tensor_says_on_which_device() -> None:
    unplaced = [
        f"{path.relative_to(ROOT)}:{call.lineno} {ast.unparse(call.func)}"
        for folder in ("zerofx", "scheduler", "passes", "codegen")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in _MAKERS
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert not unplaced
