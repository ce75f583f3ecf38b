"""Parameters whose values a step holds: all about them can be asked but their values, which whoever reads is refused.

A held parameter is the same object as ever, an ``nn.Parameter`` with shape, dtype, device and ``requires_grad``, and a
place in the model and its optimizer. Whatever would compute with it, or write to it, is an error that says what to do:
what lies in its place would make an average of weights NaN without a word. Given ``data``, it is what it was.

Does not handle: code that takes a tensor's memory without a function of torch's, such as collectives and kernels of
other libraries. That reads NaN.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from zerofx.errors import ShardedParametersError
from zerofx.ir.tensor_parts import HELD_CLASS
from zerofx.torch_private.dispatch import without_torch_functions
from zerofx.torch_private.tensors import can_take_data_of

_Of = Mapping[str, Any] | None
# Attributes that are values, or views of them.
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_ASKED = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr",
        "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
        "is_inference", "is_pinned", "is_shared", "is_same_size", "is_set_to", "get_device", "requires_grad_",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__len__", "__format__", "new_empty",
        "new_zeros", "new_ones", "new_full", "new_tensor",
    )
) | {
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.empty_like, torch.zeros_like,
    torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like, can_take_data_of,
}  # fmt: skip
# Which give the tensor itself where it is so already, as ``model.to(device)`` finds most.
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")
)


class _Held:
    """Comes before the class that a tensor had."""

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        kind = "Parameter containing:\n" if isinstance(self, nn.Parameter) else ""
        return f"{kind}<{list(self.shape)} of {self.dtype} on {self.device}, held by a compiled step>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: _Of = None
    ) -> Any:
        with without_torch_functions():
            accessed = getattr(func, "__name__", "") in ("__get__", "__set__")
            name = getattr(getattr(func, "__self__", None), "__name__", "") if accessed else ""
            if func == _SET_DATA:
                if not is_held(args[1]):
                    release(args[:1])
            elif func in _ALIASES:
                return _alias(func(*args))
            elif func in _CONVERSIONS:
                if (same := func(*args, **(kwargs or {}))) is args[0]:
                    return same
                raise _refusal(func, args)
            elif func not in _ASKED and (not name or name in _VALUES):
                raise _refusal(func, args)
            return func(*args, **(kwargs or {}))


_data: Any = torch.Tensor.data
_SET_DATA = _data.__set__
_ALIASES = (_data.__get__, torch.Tensor.detach, torch.detach)


def is_held(value: Any) -> bool:
    """True for a tensor of ``hold``, or one that ``data`` or ``detach()`` has given of one."""
    return isinstance(value, _Held)


def hold(tensors: Iterable[torch.Tensor]) -> None:
    """From now on refuse whoever reads the values of ``tensors``, or writes to them."""
    for tensor in tensors:
        if not is_held(tensor):
            tensor.__class__ = _held_class(type(tensor))


def hide(tensor: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    """Have a tensor lie on NaN (whole numbers: -1) that takes no memory, and ``hold`` it."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else -1
    tensor.data = torch.full((), value, dtype=tensor.dtype, device=device).expand(shape)
    hold([tensor])


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Have tensors be of the class that they had before ``hold``."""
    for tensor in tensors:
        if is_held(tensor):
            tensor.__class__ = type(tensor).__mro__[_PLACE_OF_OWN]


@contextlib.contextmanager
def allow_reads(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While open, those of ``tensors`` that are held are as any others, for who reads no values of theirs."""
    held = [tensor for tensor in tensors if is_held(tensor)]
    release(held)
    try:
        yield
    finally:
        hold(held)


_PLACE_OF_OWN = 2  # after the held class itself and ``_Held``


@functools.cache
def _held_class(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, HELD_CLASS: kind}
    return type(kind)(kind.__name__, (_Held, kind), names)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Hold the result of ``data`` or ``detach()``, which has no values either."""
    hold([tensor])
    return tensor


def _refusal(func: Callable[..., Any], args: tuple[Any, ...]) -> ShardedParametersError:
    what = resolve_name(func) or getattr(func, "__name__", str(func))
    shape = next((list(argument.shape) for argument in args if is_held(argument)), None)
    of_shape = "" if shape is None else f" of shape {shape}"
    return ShardedParametersError(
        f"expected {what} to be called where parameters are whole, found it given one{of_shape} whose values the "
        f"compiled step holds: call it on every rank inside `with step.full_parameters():` (with write_back=True where "
        f"it changes them), or for single ones inside `with step.full(name):`; averages of weights are average= of "
        f"zerofx.compile; where that step failed and is closed, build the model anew, and load a checkpoint"
    )
