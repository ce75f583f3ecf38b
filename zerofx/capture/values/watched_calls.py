"""Intercept torch functions that a traced model calls: some become checks, some stay one node, some are rewritten."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerofx.capture.blame import line_of_caller, user_lines
from zerofx.capture.values.logged import LoggedReads, MaskedReductions
from zerofx.capture.values.raising_branches import answer_without_raising
from zerofx.capture.values.recurrent import RecurrentCalls
from zerofx.capture.values.value_dependent import find_traceable_call
from zerofx.errors import CaptureError
from zerofx.ir.op_kernels.own_draws import generator_of
from zerofx.torch_private.dispatch import reader, without_python_dispatcher

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
# Calls that torch's Python dispatcher takes apart, as it does others, into kernels that eager mode does not run: one
# saves a mask of booleans for its backward, and what eager mode runs for the others reads values.
_BY_PYTHON = frozenset({"dropout", "istft", "one_hot", "tensor_split"})


class Checks(TorchFunctionMode):
    """Records the checks that a forward makes of tensors' values, which are unknown while it is traced.

    For ``if torch.any(variance < 0): raise ...`` the answer that does not raise is assumed, and checked in each step.
    """

    def __init__(
        self, logged: LoggedReads | None = None, is_known: Callable[[torch.Tensor], bool] | None = None
    ) -> None:
        super().__init__()
        self._noted: list[tuple[torch.Tensor, bool, str]] = []
        self._logged, self._is_known = logged, is_known
        self._masked = MaskedReductions(logged) if logged is not None else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._logged is not None and self._masked is not None and args and self._is_known is not None:
            if not self._is_known(args[-1]) and (call := self._masked.find_call(func, args, kwargs)) is not None:
                return call()
            read = NotImplemented if self._is_known(args[0]) else self._logged.call(func, args, kwargs)
            if read is not NotImplemented:
                return read
        if getattr(func, "__name__", "") not in ("_assert", "_assert_async") or not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        # Reduced here, so that nothing of the condition's size is held until the forward ends.
        return self._note(args[0].all(), True, *args[1:], *(kwargs or {}).values())

    def answer(self, asked: torch.Tensor, is_check: bool) -> Any:
        """The truth value of ``asked``, of one element, with which its reader does not raise, if there is one; else its
        value for a log, where a forward may read some."""
        own = inspect.currentframe()
        frame = reader(own and own.f_back)
        truth = True if is_check else None if frame is None else answer_without_raising(frame)
        if truth is not None:
            self._note(asked, truth)
        elif self._logged is not None:
            return self._logged.read(asked, copies=False).item()
        return truth

    def conditions(self) -> list[tuple[torch.Tensor, str]]:
        """The conditions that must hold, as booleans of one element, each with the message for its failure."""
        conditions = [(condition.detach().reshape(()), answer, text) for condition, answer, text in self._noted]
        return [
            (condition if answer and condition.dtype == torch.bool else (condition != 0) == answer, text)
            for condition, answer, text in conditions
        ]

    def _note(self, condition: torch.Tensor, answer: bool, *messages: object) -> None:
        message = f"{messages[0]}\n" if messages else ""
        lines = "\n  ".join(user_lines(traceback.extract_stack())[:2])
        self._noted.append((condition, answer, f"{message}expected to hold for the values of this step:\n  {lines}"))


class CallWatcher(TorchFunctionMode):
    """Remembers the source lines of in-place calls, and keeps calls whole that eager mode runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._recurrent = RecurrentCalls()
        self._seed = torch.initial_seed()  # what is traced draws nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.initial_seed() != self._seed:
            raise CaptureError(
                f"expected a forward that draws from torch's generator as it is, found one that seeds it before\n  "
                f"{line_of_caller() or '(line not found)'}\n"
                f"A step is captured once, and would not seed it again: draw where the batch is made, as a tensor of "
                f"it, or make what is the same in all steps a buffer."
            )
        if func in METADATA_READS:
            return func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and generator is not generator_of(generator.device):
            raise CaptureError(
                f"expected a forward that draws from torch's own generator, found one that gives another at\n  "
                f"{line_of_caller() or '(line not found)'}\n"
                f"A step is captured once, which draws from that generator too, and would not make or seed it again: "
                f"leave generator= out, draw where the batch is made, as a tensor of it, or make what is the same in "
                f"all steps a buffer."
            )
        if kwargs and generator is not None:
            kwargs = {**kwargs, "generator": None}  # the same one, which graphs of torch 2.11 cannot name
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            raise CaptureError(
                f"expected a forward whose operations can be traced, found tensor.data assigned at\n  "
                f"{line_of_caller() or '(line not found)'}\nWrite tensor.copy_(...) instead."
            )
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        in_place = in_place or bool(kwargs and (kwargs.get("inplace") or kwargs.get("out") is not None))
        rescales = bool(kwargs and kwargs.get("max_norm") is not None)  # an embedding its weight, row by row
        if (in_place or rescales) and args and isinstance(args[0], torch.Tensor):
            line = line_of_caller()
            if line:
                self.lines.append(f"{line} ({name}{' with max_norm' if rescales else ''})")
        if name == "bernoulli" and isinstance(args[0], torch.Tensor):
            # Its result is dense whatever its input is, unlike that of bernoulli_, which tracing turns into the same.
            args = (args[0].contiguous(), *args[1:])
        written = find_traceable_call(name, args, kwargs or {}) or self._recurrent.find_fused_call(
            name, args, kwargs or {}
        )
        if written is not None:
            return written()
        with contextlib.ExitStack() as stack:
            if name not in _BY_PYTHON:
                stack.enter_context(without_python_dispatcher())
            return func(*args, **(kwargs or {}))


_ATTRIBUTES = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_quantized", "ndim")
_METHODS = ("dim", "numel", "size", "storage_offset", "stride", "untyped_storage")

METADATA_READS: Final[frozenset[Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES] + [getattr(Tensor, name) for name in _METHODS]
)
