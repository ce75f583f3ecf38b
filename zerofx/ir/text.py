"""Short, stable texts for targets and values of nodes, as graphs, plans and reports show them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import DEVICE, known_origin, known_placeholder, tier_of, value
from zerofx.precision import dtype_name
from zerofx.torch_private.operators import OpOverload


class BareText(str):
    """A text that is printed without quotes inside containers."""

    def __repr__(self) -> str:
        return str(self)


def target_name(node: fx.Node) -> str:
    """A short stable name of what a call node calls: ``aten.mm.default``, ``zerofx.wait.default``, ``getitem``."""
    return _name(node.target)


def call_name(node: fx.Node) -> str:
    """``target_name`` for people: ``mm``, ``add.Tensor``, ``wait``."""
    return target_name(node).removeprefix("aten.").removeprefix("zerofx.").removesuffix(".default")


@functools.cache
def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def type_text(fake: Any) -> str:
    """Dtype and shape of a fake value in short: ``float32[8, 4]``."""
    if isinstance(fake, torch.Tensor):
        return f"{dtype_name(fake.dtype)}{list(fake.shape)}"
    if isinstance(fake, list | tuple):
        return "(" + ", ".join(type_text(item) for item in fake) + ")"
    return type(fake).__name__


def type_name(node: fx.Node) -> str:
    """Dtype and shape of a node's value in short: ``float32[8, 4]``."""
    return type_text(value(node))


def node_text(node: fx.Node) -> str:
    """A node as a line of text, stable from run to run."""
    where = known_origin(node)
    suffix = f"  # {where.layer or '(model)'} {where.phase}" if where is not None else ""
    kind = type_text(node.meta.get("val")) + ("" if tier_of(node) == DEVICE else f" on {tier_of(node)}")
    if node.op == "placeholder":
        what = known_placeholder(node)
        if what is None:
            return f"{node.name}: {kind}"
        part = "" if what.part is None else f" of micro-batch {what.part}"
        return f"{node.name}: {kind} = {what.role} {what.name}{part}"
    if node.op == "output":
        return f"return {node.args[0]}"
    kwargs = ", ".join(f"{k}={v}" for k, v in node.kwargs.items())
    args = ", ".join(str(a) for a in node.args) + (", " + kwargs if kwargs else "")
    return f"{node.name}: {kind} = {target_name(node)}({args}){suffix}"
