"""``torch.utils.checkpoint`` while a model is traced."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint


@dataclass(frozen=True)
class Kind:
    """How eager mode computes a checkpointed block again.

    ``is_reentrant``: as a whole, with what it is given saved after it has run, not before. ``stops_early``: only as far
    as backward needs what it saved.
    """

    is_reentrant: bool
    stops_early: bool


@contextlib.contextmanager
def without_checkpoints(block: Callable[[Kind], AbstractContextManager[None]]) -> Iterator[None]:
    """``torch.utils.checkpoint`` runs what it is given, and drops nothing: what is computed again is the plan's.

    ``block``: what blocks run in that eager mode computes again.
    """
    names = vars(checkpoint)
    plain = names["_checkpoint_without_reentrant_generator"]

    class AsItIs:
        """In the place of reentrant checkpoints, which give no gradient to a function without inputs that have one."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            passes = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            again = passes and torch.is_grad_enabled()
            with torch.set_grad_enabled(again), block(Kind(True, False)) if again else contextlib.nullcontext():
                return function(*args)

    def without_hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        asked = inspect.signature(plain).bind(*args, **kwargs).arguments.get("early_stop", True)
        globally = names["_enable_checkpoint_early_stop"]
        with block(Kind(False, asked if globally is None else globally)):
            yield

    instead = {"CheckpointFunction": AsItIs, "_checkpoint_without_reentrant_generator": without_hooks}
    before = {name: names[name] for name in instead}
    names.update(instead)
    try:
        yield
    finally:
        names.update(before)


def saves_tensors(function: Any) -> bool:
    """Whether a node of autograd's graph keeps tensors for backward."""
    names = (name for name in dir(function) if name.startswith("_saved_") or name == "saved_tensors")
    return any(_has_tensors(function, name) for name in names)


def _has_tensors(function: Any, name: str) -> bool:
    try:
        saved = getattr(function, name)
    except RuntimeError:  # one that has been changed in place since
        return True
    return any(isinstance(entry, torch.Tensor) for entry in (saved if isinstance(saved, tuple | list) else (saved,)))
