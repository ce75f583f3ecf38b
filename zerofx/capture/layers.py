"""Repeated layers: found by structure, and named in the annotations of traced nodes, next to the user's line.

A *unit* is what is gathered and released together. Walking down from the model, a module becomes a unit when it owns
parameters and is in a list of modules (``ModuleList``, ``Sequential``, ``ModuleDict``); the outermost such module wins,
so a transformer block is one unit and the linears inside it are not. Outside lists, a module made of modules is a unit
when its parent has another child of the same class, unless it holds units itself. ``layers.3``, ``transformer.h.3`` and
``my_blocks.7`` are all found; so are blocks held as plain attributes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.overrides import TorchFunctionMode

from zerofx.capture.blame import describe_user_line
from zerofx.capture.values.watched_calls import METADATA_READS
from zerofx.torch_private.modules import annotate, annotations_of, current_annotation, keeping_annotations

LAYER_KEY = "zerofx_layer"
LINE_KEY = "zerofx_line"
LOSS_LAYER = "loss"
_AGAIN_KEY = "zerofx_again"


def annotate_layer(layer: str) -> AbstractContextManager[None]:
    """While open, traced nodes belong to ``layer``."""
    return annotate(LAYER_KEY, layer)


def current_layer() -> str:
    """The dotted path of the module whose forward is running, inside ``traceable``."""
    return current_annotation(LAYER_KEY)


def run_again() -> AbstractContextManager[None]:
    """While open, traced nodes are ``is_run_again``: repeated for their writes to buffers."""
    return annotate(_AGAIN_KEY, _AGAIN_KEY)


def is_run_again(node: fx.Node) -> bool:
    """True if a traced node was made under ``run_again``."""
    return _AGAIN_KEY in annotations_of(node)


@contextlib.contextmanager
def layer_annotations(models: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """While open, every traced node is annotated with the path of the running module, with its model's prefix."""
    open_scopes: list[Any] = []
    handles = []
    for path, module in (named for root, model in models for named in model.named_modules(prefix=root)):

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            scope = annotate_layer(path)
            scope.__enter__()
            open_scopes.append(scope)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            open_scopes.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with keeping_annotations():
            try:
                yield
            finally:
                # Modules whose forward raised have not left: while tracing, torch passes such hooks by.
                while open_scopes:
                    open_scopes.pop().__exit__(None, None, None)
    finally:
        for handle in handles:
            handle.remove()


class SourceLines(TorchFunctionMode):
    """While open, traced nodes carry the running user line under ``LINE_KEY``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA_READS:
            return func(*args, **(kwargs or {}))
        with annotate(LINE_KEY, describe_user_line(inspect.currentframe())):
            return func(*args, **(kwargs or {}))


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module) -> tuple[str, ...]:
    """Dotted paths of the model's units in registration order; no unit is inside another.

    A module that is registered under several paths (a layer used again and again) is listed once.
    """
    return tuple(_units_in(model, "", set()))


def _units_in(module: nn.Module, path: str, seen: set[int]) -> list[str]:
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    classes = Counter(type(child) for _, child in children if any(map(_has_parameters, child.children())))
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
