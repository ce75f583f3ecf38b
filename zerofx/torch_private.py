"""What is taken from torch's private modules beside capture and Inductor: one place to look at when torch changes."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import profiler as _autograd_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what is called: it computes, on real tensors."""

is_functional = torch._is_functional_tensor
"""Whether a tensor of no class of its own stands for another one, as those do that functionalization works on."""


_BETWEEN = tuple(
    f"{Path(torch.__file__).parent}/{place}"
    for place in ("_compile.py", "_dynamo/", "_ops.py", "_subclasses/", "overrides.py")
)


def reader(frame: FrameType | None) -> FrameType | None:
    """The frame that called into torch's dispatcher, of those from ``frame`` on, which itself is behind it."""
    while frame is not None:
        name = frame.f_code.co_name
        if not name.startswith("__torch_") and not frame.f_code.co_filename.startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


def elementwise_order(*operands: torch.Tensor) -> list[int]:
    """The dimensions of what an elementwise kernel makes of operands of one shape, the outermost in memory first."""
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(*operands)[0]
    return order


@contextlib.contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """What an operator has against its arguments is in the error that it raises: torch logs it too, with all stacks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _AsItIs:
    """In the place of reentrant checkpoints, which give no gradient to a function without inputs that have one."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        passes = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(passes and torch.is_grad_enabled()):
            return function(*args)


def _no_hooks(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """``torch.utils.checkpoint`` runs what it is given, and drops nothing: what is computed again is the plan's."""
    names = vars(checkpoint)
    instead = {"CheckpointFunction": _AsItIs, "_checkpoint_without_reentrant_generator": _no_hooks}
    before = {name: names[name] for name in instead}
    names.update(instead)
    try:
        yield
    finally:
        names.update(before)


without_python_dispatcher = torch._C._DisablePythonDispatcher
"""A context in which calls go to the kernels that eager mode runs: Python's dispatcher takes some of them apart."""


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """ATen's own steps for an LSTM: oneDNN's keeps what its backward needs only with autograd on, as in no step."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def is_profiling() -> bool:
    """Whether one of torch's profilers records in this process, or its schedule has it warm up to.

    In either state a second one takes away what the first has recorded; behind a warm-up the process then crashes
    (torch 2.13). While objects are frozen (``gc.freeze``), every ``torch.profiler.profile`` counts whose block is open.
    """
    if _autograd_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    if PROFILER_STEP_NAME not in _autograd_profiler.KinetoStepTracker._step_dict:
        return False
    # Of those that warm up torch keeps no list, but an object refers to its class.
    if gc.get_freeze_count():
        return True  # what is frozen is not found
    profilers = (one for one in gc.get_referrers(torch.profiler.profile) if isinstance(one, torch.profiler.profile))
    warming_up = torch.profiler.ProfilerAction.WARMUP
    return any(one.current_action is warming_up and one.step_rec_fn is not None for one in profilers)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.t() + bias`` by oneDNN, through the one operator that gives it dense matrices as they are.

    Args:
        x: ``[rows, inputs]`` in float32, on a CPU.
        weight: ``[outputs, inputs]``, laid out either way.
        bias: ``[outputs]``, or None.

    Returns:
        ``[rows, outputs]``.
    """
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout that a process group was made with, the least of its backends'; None where it has none."""
    found = []
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        found += [options._timeout] if hasattr(options, "_timeout") else []
    return min(found, default=None)


def is_traced(value: object) -> bool:
    """Whether it is a tensor that stands for another while a model is traced, and has no values."""
    return isinstance(value, FakeTensor | FunctionalTensor)


def without_memory(
    kind: type[torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of a subclass with a ``__torch_dispatch__`` that has no memory."""
    made: torch.Tensor = kind._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    return made


_ONE_BY_ONE = torch._C.DispatchKey.CompositeExplicitAutograd


def is_foreach(op: torch._ops.OpOverload[..., Any]) -> bool:
    """Whether ``op`` works on lists of tensors, and can be taken apart into an operator for each."""
    return "_foreach_" in op._schema.name and op.has_kernel_for_dispatch_key(_ONE_BY_ONE)


def call_one_by_one(op: torch._ops.OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that ``is_foreach`` as CPUs do: one tensor at a time, by operators that dispatch modes see."""
    return op._op_dk(_ONE_BY_ONE, *args, **kwargs)


def unboxed_group(group: Any) -> dist.ProcessGroup:
    """The process group that an operator of c10d is given."""
    return dist.ProcessGroup.unbox(group)


def boxed_work() -> Any:
    """What an operator of c10d gives to wait for, of a collective that is done."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def name_of_reduction(operation: Any) -> str:
    """``"sum"`` or the like, for the reduction that an operator of c10d is given."""
    name: str = dist.ReduceOp.RedOpType(int(operation.op())).name
    return name.lower()
