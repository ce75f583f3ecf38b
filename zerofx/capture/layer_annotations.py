"""The module and the user's line that are running, told to all that is traced meanwhile."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from zerofx.capture.blame import running_line
from zerofx.errors import InternalError
from zerofx.ir.facts import Origin, Phase, origin, set_origin, set_source_line
from zerofx.torch_private.annotations import annotated, annotations_of, keeping_annotations, running_annotation
from zerofx.torch_private.capture import is_tangent

LAYER_KEY = "zerofx_layer"
LINE_KEY = "zerofx_line"
LOSS_LAYER = "loss"


def in_layer(layer: str) -> AbstractContextManager[None]:
    """While open, traced nodes are of ``layer``."""
    return annotated(LAYER_KEY, layer)


def running_layer() -> str:
    """The dotted path of the module whose forward is running, inside ``traceable``."""
    return running_annotation(LAYER_KEY)


@contextlib.contextmanager
def layer_annotations(model: nn.Module) -> Iterator[None]:
    """While open, every traced node is told the path of the module that is running."""
    open_scopes: list[Any] = []
    handles = []
    for path, module in model.named_modules():

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            scope = in_layer(path)
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
    """While open, traced nodes have the user's line that runs under ``LINE_KEY``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with annotated(LINE_KEY, running_line(inspect.currentframe())):
            return func(*args, **(kwargs or {}))


def set_origins(graph: fx.Graph, *, has_layers: bool) -> None:
    """Layer, phase and source line of every call, of a model that has layers or not.

    Backward starts at the first node that depends on the tangent. A node without a layer of its own (the sum of two
    gradients that flow into one tensor) belongs with its latest argument, whose arrival triggered it.

    Raises:
        InternalError: no node of the forward, or none of the backward, was told its layer.
    """
    are_told: dict[Phase, bool] = {}
    phase = Phase.FORWARD
    order: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        order[node] = position
        if node.op != "call_function":
            continue
        if any(map(is_tangent, node.all_input_nodes)):
            phase = Phase.BACKWARD
        annotations = annotations_of(node)
        set_source_line(node, annotations.get(LINE_KEY, ""))
        layer = annotations.get(LAYER_KEY)
        are_told[phase] = are_told.get(phase, False) or layer is not None
        if layer is None and node.all_input_nodes:
            layer = origin(max(node.all_input_nodes, key=order.__getitem__)).layer
        set_origin(node, Origin(layer or "", phase))
    if has_layers and not all(are_told.values()):
        phase = next(phase for phase, is_told in are_told.items() if not is_told)
        raise InternalError(
            f"expected torch to tell the nodes that it traces which layer made them, as torch 2.13 does, found none of "
            f"the {phase.value} that knows with torch {torch.__version__}: all layers would be taken for one. Please "
            f"report it"
        )
