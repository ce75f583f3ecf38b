"""What a traced model calls of torch's functions: noted, kept whole, or written so that it can be traced."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerofx import ops
from zerofx.blame import user_line, user_lines
from zerofx.errors import CaptureError
from zerofx.torch_private import without_onednn, without_python_dispatcher

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
# Calls that torch's Python dispatcher takes apart into kernels that eager mode does not run.
_TAKEN_APART = frozenset({"interpolate", "upsample", "gru", "gru_cell", "lstm", "lstm_cell", "rnn_tanh", "rnn_relu"})


class Checks(TorchFunctionMode):
    """Takes note of what a forward checks of tensors' values, which nobody knows while it is traced.

    ``torch._check_tensor_all`` asks ``cond._is_all_true().item()``, and is told that all are true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[torch.Tensor, str]] = []
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: an answer, and what it is about

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return func(*args, **(kwargs or {}))
        if name in ("_assert", "_assert_async"):
            return self._note(first, *args[1:], *(kwargs or {}).values())
        if name == "item" and id(first) in self._asked:
            self._note(self._asked[id(first)][1])
            return True
        found = func(*args, **(kwargs or {}))
        if name == "_is_all_true":
            self._asked[id(found)] = found, first
        return found

    def _note(self, condition: torch.Tensor, *messages: object) -> None:
        said = f"{messages[0]}\n" if messages else ""
        lines = "\n  ".join(user_lines(traceback.extract_stack())[:2])
        text = f"{said}expected to hold for the values of this step:\n  {lines}"
        # Reduced here, so that nothing of the condition's size is held until the forward ends.
        self.noted.append((condition.all(), text))


class CallWatcher(TorchFunctionMode):
    """Remembers the source lines of in-place calls, and keeps calls whole that eager mode runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            raise CaptureError(
                f"expected a forward whose operations can be traced, found tensor.data assigned at\n  "
                f"{user_line(traceback.extract_stack()) or '(line not found)'}\nWrite tensor.copy_(...) instead."
            )
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        in_place = in_place or bool(kwargs and (kwargs.get("inplace") or kwargs.get("out") is not None))
        rescales = bool(kwargs and kwargs.get("max_norm") is not None)  # an embedding its weight, row by row
        if (in_place or rescales) and args and isinstance(args[0], torch.Tensor):
            line = user_line(traceback.extract_stack())
            if line:
                self.lines.append(f"{line} ({name}{' with max_norm' if rescales else ''})")
        if name == "bernoulli" and isinstance(args[0], torch.Tensor):
            # Its result is dense whatever its input is, unlike that of bernoulli_, which tracing turns into the same.
            args = (args[0].contiguous(), *args[1:])
        if name == "__setitem__" and _puts_one_value(*args):
            return _put(*args)
        with contextlib.ExitStack() as stack:
            if name in _TAKEN_APART:
                stack.enter_context(without_python_dispatcher())
            if name == "lstm":
                stack.enter_context(without_onednn())
            return func(*args, **(kwargs or {}))


def _puts_one_value(x: Any, mask: Any, value: Any) -> bool:
    """Whether ``x[mask] = value`` gives all rows that a mask names one value, which has a gradient."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and 0 < mask.dim() <= x.dim()
        and mask.shape == x.shape[: mask.dim()]
        and isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.dtype == x.dtype
        and (value.dim() <= x.dim() - mask.dim() or (value.dim() == x.dim() - mask.dim() + 1 and len(value) == 1))
    )


def _put(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> None:
    """``x[mask] = value`` whose backward has no tensor with as many rows as the mask names.

    Eager mode gives the value the sum of those rows of a gradient, which it takes out: here one operator does both.
    """
    rows = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    x.copy_(torch.where(rows, _Spread.apply(value, mask, x.shape), x))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """A value in each place of a shape, whose gradient is that of the rows which a mask names."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.size = value.shape
        return value.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return ops.masked_sum(gradient, mask, ctx.size), None, None
