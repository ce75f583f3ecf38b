"""Annotate traced nodes with the module and the user's line that run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.overrides import TorchFunctionMode

from zerofx.capture.blame import running_line
from zerofx.capture.values.metadata_reads import METADATA_READS
from zerofx.torch_private.annotations import annotated, annotations_of, keeping_annotations, running_annotation

LAYER_KEY = "zerofx_layer"
LINE_KEY = "zerofx_line"
LOSS_LAYER = "loss"
_AGAIN_KEY = "zerofx_again"


def in_layer(layer: str) -> AbstractContextManager[None]:
    """While open, traced nodes are of ``layer``."""
    return annotated(LAYER_KEY, layer)


def running_layer() -> str:
    """The dotted path of the module whose forward is running, inside ``traceable``."""
    return running_annotation(LAYER_KEY)


def run_again() -> AbstractContextManager[None]:
    """While open, traced nodes are ``is_run_again``: a second time, for what they write to buffers."""
    return annotated(_AGAIN_KEY, _AGAIN_KEY)


def is_run_again(node: fx.Node) -> bool:
    """Whether a traced node is one of those."""
    return _AGAIN_KEY in annotations_of(node)


@contextlib.contextmanager
def layer_annotations(models: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """While open, every traced node is annotated with the path of the module that runs; each model has what the paths
    in it begin with."""
    open_scopes: list[Any] = []
    handles = []
    for path, module in (named for root, model in models for named in model.named_modules(prefix=root)):

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
        if func in METADATA_READS:
            return func(*args, **(kwargs or {}))
        with annotated(LINE_KEY, running_line(inspect.currentframe())):
            return func(*args, **(kwargs or {}))
