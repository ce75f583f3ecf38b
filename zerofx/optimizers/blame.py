"""Find the line of the optimizer's code that is running, to name it in errors."""

from __future__ import annotations

import inspect
from types import FrameType

from zerofx.errors import OptimizerError


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


def not_elementwise(name: str, reason: str) -> OptimizerError:
    """The error for the optimizer ``name``, whose update cannot run on flat shards."""
    return OptimizerError(
        f"expected an optimizer whose update is elementwise, found that {name} {reason}; use an elementwise optimizer "
        f"(such as AdamW, SGD, or a subclass of theirs)"
    )


def looks_at_shapes(name: str) -> OptimizerError:
    """The error for the optimizer ``name``, whose update of a flat shard would not be that of what is in it."""
    return OptimizerError(
        f"expected an optimizer whose update is elementwise, found that {name} treats parameters of different shapes "
        f"differently, and a flat shard holds pieces of many parameters: put its kinds of parameters in separate "
        f"optimizers"
    )
