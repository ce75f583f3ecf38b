"""Find the line of the optimizer's code that is running, to name it in errors."""

from __future__ import annotations

import inspect
from types import FrameType


def optimizer_frame() -> FrameType | None:
    """The innermost running frame of the optimizer's code; None if it has returned."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        ours = ("torch.", "zerofx.optimizers", "zerofx.torch_private", "contextlib")
        outside = not module.startswith(ours) and module != "torch"
        if outside or module.startswith("torch.optim."):
            return None if module.split(".")[0] == "zerofx" else frame
        frame = frame.f_back
    return None


def blame() -> str:
    """`` (file:line)`` of the optimizer's code that is running."""
    frame = optimizer_frame()
    return "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
