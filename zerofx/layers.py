"""Find a model's repeated layers by structure, never by name.

A *unit* is what is gathered and released together. Walking down from the model, a module becomes a unit when it owns
parameters and stands in a list of modules (``ModuleList``, ``Sequential``, ``ModuleDict``), or when its parent has
another child of the same class that is itself made of modules with parameters. The outermost such module wins, so a
transformer block is one unit and the linears inside it are not. ``layers.3``, ``transformer.h.3`` and ``my_blocks.7``
are all found; so are blocks held as plain attributes.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def find_units(model: nn.Module) -> tuple[str, ...]:
    """Dotted paths of the model's units in registration order; no unit is inside another.

    A module that is registered under several paths (a layer used again and again) is listed once.
    """
    found: list[str] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
        classes = Counter(type(child) for _, child in children if _is_composite(child))
        in_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for name, child in children:
            child_path = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            seen.add(id(child))
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict) or (
                isinstance(child, nn.Sequential) and not in_list
            )
            if not is_container and (in_list or classes[type(child)] > 1):
                found.append(child_path)
            else:
                visit(child, child_path)

    visit(model, "")
    return tuple(found)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_composite(module: nn.Module) -> bool:
    return any(_has_parameters(child) for child in module.children())
