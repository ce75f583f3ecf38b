"""``torch.utils.checkpoint`` while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint


class _AsItIs:
    """In the place of reentrant checkpoints, which give no gradient to a function without inputs that have one."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        passes = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(passes and torch.is_grad_enabled()):
            return function(*args)


def _no_hooks(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """``torch.utils.checkpoint`` runs what it is given, and drops nothing: what is computed again is the plan's."""
    names = vars(checkpoint)
    instead = {"CheckpointFunction": _AsItIs, "_checkpoint_without_reentrant_generator": _no_hooks}
    before = {name: names[name] for name in instead}
    names.update(instead)
    try:
        yield
    finally:
        names.update(before)
