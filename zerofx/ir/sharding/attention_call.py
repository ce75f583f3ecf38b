"""Arguments of fused attention by name: its operators have them at different positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from zerofx.ir.facts import value
from zerofx.ir.sharding.rule import argument
from zerofx.torch_private.operators import OpOverload, schema_of


def places(node: fx.Node) -> dict[str, int]:
    """The position of each argument of a call's operator, by name."""
    assert isinstance(node.target, OpOverload)
    return {argument.name: number for number, argument in enumerate(schema_of(node.target).arguments)}


def named_argument(node: fx.Node, name: str) -> Any:
    """An argument of a call; None if it is not passed or its operator has none of this name."""
    place = places(node)
    return argument(node, place[name], name) if name in place else None


def queries_and_keys(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Queries ``[samples, heads, tokens, size]``, keys and values."""
    return named_argument(node, "query"), named_argument(node, "key"), named_argument(node, "value")


def is_backward(node: fx.Node) -> bool:
    """True for a call of a backward operator."""
    return not places(node).keys().isdisjoint(("grad_out", "grad_out_"))


def mask_name(node: fx.Node) -> str | None:
    """The name of the operator's argument that is added to the scores; None if it takes none."""
    return next((name for name in ("attn_mask", "attn_bias") if name in places(node)), None)


def tensor_names(node: fx.Node) -> list[str]:
    """The names of a call's tensor arguments, in the order of ``read_tensors``."""
    names = list(places(node))
    given = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    return [name for name, source in given if isinstance(source, fx.Node) and isinstance(value(source), Tensor)]


def arguments(node: fx.Node, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange ``given``, arguments by name, as args and kwargs of a call's operator; the rest have their defaults."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = [], {}
    for entry in schema_of(node.target).arguments:
        known = given.get(entry.name, entry.default_value)
        if entry.kwarg_only:
            kwargs[entry.name] = known
        else:
            args.append(known)
    return tuple(args), kwargs
