"""Dispatch modes, and calls that bypass them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what is called: it computes, on real tensors."""

without_torch_functions = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch do not ask the classes of their arguments for a ``__torch_function__``."""

python_dispatcher = enable_python_dispatcher
"""A context in which Python's dispatcher takes apart what it has a function for, which C++ would do by the device."""

without_python_dispatcher = torch._C._DisablePythonDispatcher
"""A context in which calls go to the kernels that eager mode runs: Python's dispatcher takes some of them apart."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which calls go past autograd, whatever their arguments: kernels see only whether it is on."""


def run_as_written() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions that are compiled run as they are written, as far as any can have been compiled."""
    # To ask for the stance imports the compiler, which takes a second.
    has_compiler = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if has_compiler else contextlib.nullcontext()


def default_device_type() -> str:
    """The type of torch's default device; if it is not the CPU, one of the function modes says so."""
    return torch.get_default_device().type if torch._C._len_torch_function_stack() else "cpu"


def flags_of_libraries() -> tuple[tuple[bool, bool], tuple[bool, bool, bool]]:
    """Flags of ``torch.backends``, past its properties: whether algorithms and cuDNN's have to be deterministic;
    whether oneDNN and cuDNN are enabled, and cuDNN tries its algorithms."""
    return (
        (torch.are_deterministic_algorithms_enabled(), torch._C._get_cudnn_deterministic()),
        (torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark()),
    )


_BETWEEN = tuple(
    f"{Path(torch.__file__).parent}/{place}"
    for place in ("_compile.py", "_dynamo/", "_ops.py", "_subclasses/", "overrides.py")
)


def reader(frame: FrameType | None) -> FrameType | None:
    """The frame that called into torch's dispatcher, from ``frame`` outwards."""
    while frame is not None:
        name = frame.f_code.co_name
        if not name.startswith("__torch_") and not frame.f_code.co_filename.startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


def class_being_made(frame: FrameType | None) -> type[torch.Tensor] | None:
    """The subclass of tensors whose ``__new__`` has called into torch's dispatcher, and so the ``__torch_dispatch__``
    of ``frame``: it makes one of the result, by ``torch.Tensor._make_subclass``, which takes such a one as it is.
    """
    frame = frame and frame.f_back
    if frame is None or frame.f_code.co_name != "__new__" or frame.f_globals.get("__name__", "").startswith("torch."):
        return None
    kind = frame.f_locals.get(frame.f_code.co_varnames[0])
    return kind if isinstance(kind, type) and issubclass(kind, torch.Tensor) else None


@contextlib.contextmanager
def silence_fake_log() -> Iterator[None]:
    """Turn off torch's log of errors in operators' arguments, which are raised anyway, with all stacks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def override_composite(op: OpOverload[..., Any], function: Callable[..., Any]) -> Iterator[None]:
    """While open, ``python_dispatcher`` calls ``function`` where C++ would decompose ``op``."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    before = {key: op.py_kernels.pop(key) for key in keys if key in op.py_kernels}
    for key in keys:
        op.py_impl(key)(function)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for key in keys:
            del op.py_kernels[key]
        op.py_kernels.update(before)
        op._dispatch_cache.clear()
