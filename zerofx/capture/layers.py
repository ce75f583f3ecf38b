"""Find a model's repeated layers by structure, never by name.

A *unit* is what is gathered and released together. Walking down from the model, a module becomes a unit when it owns
parameters and stands in a list of modules (``ModuleList``, ``Sequential``, ``ModuleDict``); the outermost such module
wins, so a transformer block is one unit and the linears inside it are not. Outside lists, a module made of modules is
a unit when its parent has another child of the same class, unless it holds units itself. ``layers.3``,
``transformer.h.3`` and ``my_blocks.7`` are all found; so are blocks held as plain attributes.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module) -> tuple[str, ...]:
    """Dotted paths of the model's units in registration order; no unit is inside another.

    A module that is registered under several paths (a layer used again and again) is listed once.
    """
    return tuple(_units_in(model, "", set()))


def _units_in(module: nn.Module, path: str, seen: set[int]) -> list[str]:
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    classes = Counter(type(child) for _, child in children if _is_composite(child))
    in_list = isinstance(module, _LISTS)
    units: list[str] = []
    for name, child in children:
        if id(child) in seen:
            continue
        seen.add(id(child))
        child_path = f"{path}.{name}" if path else name
        if in_list and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            units.append(child_path)
            continue
        inside = _units_in(child, child_path, seen)
        is_sibling = classes[type(child)] > 1 and not isinstance(child, _LISTS)
        # An encoder and a decoder of one class are no layers: they are made of layers.
        units += inside if inside or not is_sibling else [child_path]
    return units


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_composite(module: nn.Module) -> bool:
    return any(_has_parameters(child) for child in module.children())
