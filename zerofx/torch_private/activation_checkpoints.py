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
    """The way eager mode recomputes a checkpointed block.

    ``is_reentrant``: as a whole, with its inputs saved after it has run, not before. ``stops_early``: only as far as
    backward needs the saved tensors.
    """

    is_reentrant: bool
    stops_early: bool


@contextlib.contextmanager
def disable_checkpoints(block: Callable[[Kind], AbstractContextManager[None]]) -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` run functions and drop nothing: recomputation is up to the plan.

    ``block``: the context for blocks that eager mode recomputes.
    """
    names = vars(checkpoint)
    plain = names["_checkpoint_without_reentrant_generator"]

    class PlainCheckpoint:
        """Replaces reentrant checkpoints, which give no gradient to a function without inputs that have one."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            passes = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            again = passes and torch.is_grad_enabled()
            with torch.set_grad_enabled(again), block(Kind(True, False)) if again else contextlib.nullcontext():
                return function(*args)

    def run_plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        asked = inspect.signature(plain).bind(*args, **kwargs).arguments.get("early_stop", True)
        globally = names["_enable_checkpoint_early_stop"]
        with block(Kind(False, asked if globally is None else globally)):
            yield

    instead = {"CheckpointFunction": PlainCheckpoint, "_checkpoint_without_reentrant_generator": run_plainly}
    before = {name: names[name] for name in instead}
    names.update(instead)
    try:
        yield
    finally:
        names.update(before)


def saves_tensors(function: Any) -> bool:
    """True if a node of autograd's graph keeps tensors for backward."""
    names = (name for name in dir(function) if name.startswith("_saved_") or name == "saved_tensors")
    return any(_has_tensors(function, name) for name in names)


def _has_tensors(function: Any, name: str) -> bool:
    try:
        saved = getattr(function, name)
    except RuntimeError:  # one that has been changed in place since
        return True
    return any(isinstance(entry, torch.Tensor) for entry in (saved if isinstance(saved, tuple | list) else (saved,)))
