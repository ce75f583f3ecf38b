"""What a function is taken to reach: what its code names."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import torch

from zerofx.capture.free_tensors.free_tensors import FreeTensors


def function_that_names(name: str, value: Any) -> Any:
    """A function whose code has a global by a name that nobody can write, as pytest's own in an ``assert``."""
    tree = ast.parse("def forward(x):\n    return tool.scale * x")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "tool":
            node.id = name
    namespace: dict[str, Any] = {name: value, "__name__": "somewhere"}
    exec(compile(tree, "somewhere", "exec"), namespace)
    return namespace["forward"]


class Tool(SimpleNamespace):
    scale: torch.Tensor


def test_what_a_tool_has_written_into_code_is_not_gone_through() -> None:
    tool = Tool(scale=torch.ones(1))
    for name, is_reached in (("tool", True), ("@tool", False)):
        forward = function_that_names(name, tool)
        assert any(value is tool.scale for _, value in FreeTensors(forward, "forward").reachable()) is is_reached


class Counted(tuple[torch.Tensor, ...]):
    """As in e3nn: what it stands for has no length."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError


class Hidden(dict[str, torch.Tensor]):
    def items(self) -> Any:
        raise NotImplementedError


def test_a_container_that_says_something_else_than_it_holds_is_gone_through() -> None:
    first, second = torch.ones(1), torch.ones(2)
    tool = SimpleNamespace(scales=Counted((first,)), named=Hidden(second=second))
    outside = FreeTensors(function_that_names("tool", tool), "forward")
    assert outside.learn(first) and outside.learn(second)
    assert all(value is expected for value, expected in zip(outside.tensors().values(), (first, second), strict=True))
