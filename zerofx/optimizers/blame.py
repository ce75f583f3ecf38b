"""Find the line of the optimizer's code that is running, to name it in errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType

from zerofx.errors import OptimizerError


class NotElementwiseError(OptimizerError):
    """The update cannot run on flat shards; it may on whole parameters."""


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


def not_elementwise(name: str, reason: str) -> NotElementwiseError:
    """The error for the optimizer ``name``, whose update cannot run on flat shards."""
    return NotElementwiseError(
        f"expected an optimizer whose update is elementwise, found that {name} {reason}; use an elementwise optimizer "
        f"(such as AdamW, SGD, or a subclass of theirs)"
    )


def looks_at_shapes(name: str) -> NotElementwiseError:
    """The error for the optimizer ``name``, whose update of a flat shard would not be that of what is in it."""
    return NotElementwiseError(
        f"expected an optimizer whose update is elementwise, found that {name} treats parameters of different shapes "
        f"differently, and a flat shard holds pieces of many parameters: put its kinds of parameters in separate "
        f"optimizers"
    )


def does_not_step(name: str, states: Iterable[str], error: Exception) -> OptimizerError:
    """The error for the optimizer ``name``, whose ``step()`` has raised ``error`` with the states that it has."""
    there = sorted(states)
    if isinstance(error, KeyError) and there:
        return OptimizerError(
            f"expected {name}.step() to run with the states that it has ({', '.join(there)}), found that it looks for "
            f"{error}, which it makes in its first step alone, in eager mode too: an option such as amsgrad "
            f"was switched on since; switch it off again, or call step.close(), and build and compile the optimizer "
            f"anew with it"
        )
    return NotElementwiseError(
        f"expected {name}.step() to run on one flat parameter with state {there}, found {type(error).__name__}: "
        f"{error}; use an optimizer that steps without a closure and takes parameters of any shape"
    )
