"""Values that a forward reads from traced tensors, and that only Python's own objects get: what scripts log.

A tensor that is read is one more output of the step. While the forward is traced its reads give examples; after each
step the code around the model's modules runs again, on fakes, and its reads give the step's values (``replay.py``). So
whatever Python computes, compares, prints or keeps is what eager mode would, by the same lines. Where an example
decides what is computed with tensors, the forward is refused.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.capture.blame import line_of_caller
from zerofx.capture.python_state.undo import WritesError, raise_before_writing
from zerofx.capture.values.raising_branches import answer_without_raising
from zerofx.errors import CaptureError
from zerofx.torch_private.dispatch import reader, without_modes
from zerofx.torch_private.tensors import is_traced

Source = Callable[[torch.Tensor], torch.Tensor]
"""The values of a traced tensor that is read, on the CPU."""

MOST_ELEMENTS = 1 << 20
"""The elements that a tensor which is read as a whole (``tolist``, ``numpy``) has at most."""
_READERS = frozenset(
    {"tolist", "numpy", "__array__", "__format__", "item", "__float__", "__int__", "__bool__", "__index__"}
)
_EXTREMES = frozenset({"min", "amin", "max", "amax"})


@dataclass
class Logging:
    """The way in which the forwards of one objective read values for logs. ``is_on``: whether any does.

    ``writers`` write them to files and the like. ``changes``: a forward changes Python's objects besides its modules,
    which is as good as a log. ``compiled``: the answer to a forward that asks whether it is compiled. ``untrue``: the
    lines that read a truth of which the example is False. ``tried``: the run of a replay that values have been tried
    on, for the next one that is made.
    """

    is_on: bool = False
    changes: bool = False
    compiled: bool = True
    untrue: set[str] = field(default_factory=set)
    writers: list[WritesError] = field(default_factory=list)
    tried: object = None


def example_of(tensor: torch.Tensor) -> torch.Tensor:
    """Ones: true, as most conditions of a log are, and neither a divisor nor a logarithm that fails."""
    with without_modes():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")


def raises_else() -> bool:
    """True if code of torch's caller is about to branch, and one branch raises an error: a check, and no log."""
    frame = reader(inspect.currentframe())
    while frame is not None and frame.f_globals.get("__name__", "").startswith("zerofx.capture."):
        frame = reader(frame.f_back)
    return frame is not None and answer_without_raising(frame) is not None


class LoggedReads:
    """The reads of one call of a forward: ``tensors`` in order, with their source lines. Values are of ``source``.

    Where that gives examples, those of truths that the lines ``untrue`` read are False.
    """

    def __init__(self, source: Source, untrue: Collection[str], *, watches: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lines: list[str] = []
        self.rounded: list[tuple[torch.Tensor, str]] = []  # sums over masks, with their lines
        self._source, self._untrue, self._watches = source, untrue, watches
        self._readers: set[int] = set()

    def read(self, tensor: torch.Tensor, *, copies: bool = True) -> torch.Tensor:
        """The values of ``tensor``, on the CPU; ``copies``: it may be changed in place later."""
        sys.setprofile(None)  # what is done here is nobody's log
        line = line_of_caller() or "(line not found)"
        if tensor.numel() > MOST_ELEMENTS:
            raise CaptureError(
                f"expected a forward that reads at most {MOST_ELEMENTS} elements of a tensor for a log, found "
                f"{tensor.numel()} at\n  {line}\nReduce the tensor first, or return it from forward="
            )
        copy = tensor.detach().clone() if copies else tensor.detach()
        value = self._source(copy)
        if self._source is example_of and line in self._untrue:
            with without_modes():
                value = value.logical_not() if value.dtype == torch.bool else value
        self.tensors.append(copy)
        self.lines.append(line)
        if self._watches:
            self._watch()
        return value

    def _watch(self) -> None:
        """From here on raise where something is about to be written, which may be what is read."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_argcount:
                self._readers.add(id(frame.f_locals.get(frame.f_code.co_varnames[0])))
            frame = frame.f_back
        sys.setprofile(partial(raise_before_writing, readers=self._readers))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """The result of ``item``, ``tolist`` and the like; ``NotImplemented`` for what reads no values for a log."""
        name = getattr(func, "__name__", "")
        if name not in _READERS or raises_else():
            return NotImplemented
        value = self.read(args[0])
        with without_modes():
            return func(value, *args[1:], **(kwargs or {}))


class MaskedReductions:
    """Sums, means and extremes of the elements that a mask names, without taking them out: ``x[mask].mean()``.

    How many elements there are depends on values, so that no graph can hold them. The sum of the others as zeros is
    the same by rounding: good enough for a log, which alone may depend on it (``replay.py``). The extreme of none,
    which is an error in eager mode, is NaN.
    """

    def __init__(self, logged: LoggedReads) -> None:
        self._masks: Any = WeakIdKeyDictionary()
        self._logged = logged

    def find_call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
        """The call of a function of torch in a form that can be traced; None if it needs none.

        Raises:
            CaptureError: the elements are used otherwise.
        """
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and _is_mask(*args):
            return lambda: self._mark(args[0].masked_fill(~args[1], 0), args[1])
        if name in ("__get__", "size", "dim", "numel", "stride") and not kwargs and self._masks.get(args[0]) is None:
            return None
        marked = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Tensor)]
        marked = [arg for arg in marked if self._masks.get(arg) is not None]
        if not marked:
            return None
        mask = self._masks[marked[0]]
        if name in ("detach", "float", "double", "to") and marked[0] is args[0]:
            return lambda: self._mark(func(*args, **(kwargs or {})), mask)
        if name in ("sum", "mean") and len(args) == 1 and not set(kwargs or {}) - {"dtype"}:
            return lambda: self._reduce(args[0], mask if name == "mean" else None, kwargs or {})
        if name in _EXTREMES and len(args) == 1 and not kwargs and args[0].is_floating_point():
            return lambda: self._extreme(name, args[0], mask)
        what = getattr(getattr(func, "__self__", None), "__name__", name)
        raise CaptureError(
            f"expected a forward whose shapes do not depend on values, found {what} of the elements that a mask names, "
            f"as many as values say, at\n  {line_of_caller() or '(line not found)'}\n"
            f"A step is planned for one shape: their sum, mean, minimum and maximum may be logged; else compute with "
            f"all elements, and leave out what does not count by torch.where or a weight of 0."
        )

    def _reduce(self, tensor: torch.Tensor, mask: torch.Tensor | None, options: Any) -> torch.Tensor:
        """The sum of ``tensor``, or the mean of what ``mask`` names."""
        return self._note(tensor.sum(**options) if mask is None else tensor.sum(**options) / mask.sum())

    def _extreme(self, name: str, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The least or largest of what ``mask`` names."""
        is_least = name in ("min", "amin")
        chosen = tensor.masked_fill(~mask, math.inf if is_least else -math.inf)
        return self._note((chosen.amin() if is_least else chosen.amax()).masked_fill(~mask.any(), math.nan))

    def _note(self, result: torch.Tensor) -> torch.Tensor:
        """Note that the loss may not depend on ``result``."""
        self._logged.rounded.append((result, line_of_caller() or "(line not found)"))
        return result

    def _mark(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._masks[tensor] = mask
        return tensor


def _is_mask(x: torch.Tensor, mask: Any) -> bool:
    is_mask = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    return is_mask and is_traced(mask) and mask.shape == x.shape
