"""A model on fake tensors: the stand-ins for its parameters, buffers and batch while its forward runs or is traced.

Nothing of the model is computed or changed: the stand-ins are removed again.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import nn

from zerofx.capture.blame import depends_on_values, reads_leaked_tensor, user_line
from zerofx.capture.compat.decompositions import dropouts_that_may_drop_nothing
from zerofx.capture.fake_state import TracedParts, fake_state
from zerofx.capture.for_gpu.gpu import AbsentGpu
from zerofx.capture.free_tensors.free_tensors import StandInMaker
from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.capture.layers import LOSS_LAYER, annotate_layer, find_units, layer_annotations
from zerofx.capture.leaked_tensors import learn_caches
from zerofx.capture.objective.loss import Loss, LossModule, Objective
from zerofx.capture.values.in_place_calls import traceable_in_place_calls
from zerofx.capture.values.known import KnownValues
from zerofx.errors import CaptureError, summarise_error, warn
from zerofx.ir.batch import Batch
from zerofx.ir.casts import Casts, ComputeDtype, cast_of
from zerofx.ir.facts import Placeholder, Role
from zerofx.ir.parameters import ParameterInfo, Strides, parameter_infos
from zerofx.ir.tensor_parts import is_table, named_parameters
from zerofx.torch_private.capture import (
    AbsentDeviceFakes,
    FakeTensorMode,
    fake_mode,
    fake_tensor,
    pretend_compiling,
)
from zerofx.torch_private.dispatch import silence_fake_log, without_modes
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import mark_as_parameter

T = TypeVar("T")


def try_eager_then_compiled(trace: Callable[[bool], T]) -> T:
    """Trace a forward as eager mode would run it or, if that cannot be traced, as compiled.

    Libraries ask ``torch.compiler.is_compiling()`` before they look at values, and choose other kernels by what they
    see: a mask that is only causal is a flag in eager mode. A trace knows the values that follow from constants; a
    forward that reads another value is told that it is compiled. So is one that cannot be traced for another reason,
    with a warning. Tensors that caches keep from an earlier trace are removed first.

    Args:
        trace: whether to say so, to what is traced then.
    """
    refusal = None
    for compiled in (False, True):
        try:
            traced = trace(compiled)
        except Exception as error:
            if reads_leaked_tensor(error) and learn_caches():
                return try_eager_then_compiled(trace)
            if compiled:
                raise
            refusal = _refusal(error)
        else:
            break
    if refusal is not None:
        warn(
            f"expected a forward that can be traced as eager mode runs it, found {refusal}\n"
            f"It is traced as torch.compile would: torch.compiler.is_compiling() is true, and libraries that ask "
            f"compute otherwise than in eager mode, not always to the bit"
        )
    return traced


def _refusal(error: Exception) -> str | None:
    """The reason why a forward could not be traced, and where, unless it depends on values."""
    cause = error.__cause__ if isinstance(error, CaptureError) and isinstance(error.__cause__, Exception) else error
    if depends_on_values(cause):
        return None
    line = user_line(traceback.extract_tb(cause.__traceback__))
    return f"{summarise_error(cause)}, at\n  {line or '(line not found)'}"


class CaptureOptions(TypedDict, total=False):
    """Options of ``capture`` besides the model and the batch; the fields of ``Forward``."""

    loss_fn: Loss
    compute_dtype: ComputeDtype
    num_micro_batches: int
    strides: Strides
    gpu: AbsentGpu | None


@dataclass(frozen=True)
class Forward:
    """A model's forward of a batch, and its loss, to be traced or recorded; fields as arguments of ``capture``."""

    model: nn.Module
    batch: Batch
    loss_fn: Loss = None
    compute_dtype: ComputeDtype = None
    num_micro_batches: int = 1
    strides: Strides = field(default_factory=lambda: MappingProxyType({}))
    gpu: AbsentGpu | None = None

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective of the batch."""
        return Objective.make(self.loss_fn)

    @property
    def lent(self) -> tuple[SharedModel, ...]:
        """The models of other steps that are known to be used."""
        return self.objective.free_tensors.lent

    def parameters(self) -> tuple[ParameterInfo, ...]:
        """The model's parameters, and after them those of other steps that are read from buckets."""
        others = (info for entry in self.lent for info in entry.parameters())
        return (*parameter_infos(self.model, self.compute_dtype, self.strides), *others)

    def units(self) -> frozenset[str]:
        """The repeated layers of all these models."""
        return frozenset((*find_units(self.model), *(unit for entry in self.lent for unit in entry.units())))


@contextlib.contextmanager
def traceable(
    forward: Forward, *, compiled: bool, mode: FakeTensorMode | None = None
) -> Iterator[tuple[LossModule, tuple[torch.Tensor, ...], torch.device, FakeTensorMode]]:
    """While open, the model is on fake tensors, and running code knows its layer (``current_layer``).

    Gives the module that computes the loss, the fake tensors of the batch, their device, and their mode. For an absent
    GPU that device is the CPU. ``compiled``: the answer to a forward that asks whether it is compiled. ``mode``: that
    of the fake tensors, where it is not a mode of their own.
    """
    model, batch, compute_dtype, gpu = forward.model, forward.batch, forward.compute_dtype, forward.gpu
    lent, parts = forward.lent, TracedParts()
    mode = mode or (fake_mode() if gpu is None else AbsentDeviceFakes(gpu.device))
    device = trace_device(model, batch, gpu)
    for lender in lent:
        lender.check()
    with (
        contextlib.ExitStack() as stack,
        forward.objective.setting(model),
        torch.enable_grad(),
        silence_fake_log(),
        fake_state(model, mode, compute_dtype, device, forward.strides, parts) as of_model,
        layer_annotations([("", model), *((lender.name, lender.model) for lender in lent)]),
        compute_in_float32(compute_dtype),
        pretend_compiling() if compiled else contextlib.nullcontext(),
        dropouts_that_may_drop_nothing(),
        traceable_in_place_calls(),
        require_torch_randomness(),
        gpu.emulate() if gpu is not None else contextlib.nullcontext(),
    ):
        of_all = dict(of_model)
        for lender in lent:
            its = lender.compute_dtype
            state = fake_state(lender.model, mode, its, device, lender.strides, parts, lent_as=lender.name)
            of_all |= stack.enter_context(state)
            stack.enter_context(compute_in_float32(its))
        fakes = tuple(fake_tensor(mode, t.shape, t.stride(), cast_of(t, compute_dtype), device) for t in batch.tensors)
        loss_scope = partial(annotate_layer, LOSS_LAYER)

        def make_fake(real: torch.Tensor) -> torch.Tensor:
            where = device if real.is_meta else real.device
            with without_modes():
                fake = fake_tensor(mode, real.shape, real.stride(), real.dtype, where)
            return mark_as_parameter(fake, requires_grad=True) if real.requires_grad else fake

        maker = StandInMaker(make_fake, of_all)
        with KnownValues() as known:
            lossy = LossModule(
                model, batch, forward.objective, forward.num_micro_batches, loss_scope, known, maker, parts
            )
            yield lossy, fakes, device, mode


def model_tensors(lossy: LossModule, fakes: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, Placeholder]]:
    """The tensors that a traced forward may read, each with what it is in the graph."""
    for name, parameter in lossy.model.named_parameters():
        yield parameter, Placeholder(Role.PARAMETER, name)
    for number, name in enumerate(lossy.parts.names):
        table, key = lossy.parts.place(number)
        yield table[key], Placeholder(Role.BUFFER if is_table(table[key]) else Role.PARAMETER, name)
    for name, buffer in lossy.model.named_buffers():
        yield buffer, Placeholder(Role.BUFFER, name)
    for lender in lossy.lenders():
        role = Role.PARAMETER if lender.in_buckets else Role.OUTSIDE
        for name, parameter in lender.model.named_parameters():
            yield parameter, Placeholder(role, lender.full_name(name))
        for name, buffer in lender.model.named_buffers():
            yield buffer, Placeholder(Role.BUFFER, lender.full_name(name))
    for key, tensor in (*lossy.free_tensors.named_parameters(), *lossy.free_tensors.named_buffers()):
        yield tensor, Placeholder(Role.OUTSIDE, lossy.free_tensor_names[int(key)])
    for index, fake in enumerate(fakes):
        yield fake, Placeholder(Role.INPUT, str(index))


def trace_device(model: nn.Module, batch: Batch, gpu: AbsentGpu | None = None) -> torch.device:
    """The device to trace on: the model's, or the batch's when the model is on ``meta``, or the CPU."""
    if gpu is not None:
        return torch.device("cpu")
    for tensor in (*(parameter for _, parameter in named_parameters(model)), *batch.tensors):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def compute_in_float32(compute_dtype: ComputeDtype) -> Iterator[None]:
    """While open, the modules that keep float32 get their inputs in it, and return their results in the others' dtype.

    Scalars that they return stay in float32: a loss, say.
    """
    if not isinstance(compute_dtype, Casts):
        yield
        return
    low = compute_dtype.dtype

    def widen(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.float() if _is_of(leaf, low) else leaf, (args, kwargs))

    def narrow(_module: nn.Module, _args: Any, output: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf.to(low) if _is_of(leaf, torch.float32) and leaf.dim() else leaf, output
        )

    handles: list[Any] = []
    try:
        for module in compute_dtype.modules:
            handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            handles.append(module.register_forward_hook(narrow, prepend=True))  # inside of the module's layer
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_of(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is dtype


@contextlib.contextmanager
def preserve_randomness(device: torch.device) -> Iterator[None]:
    """Leave the random generators of torch, numpy and Python as they were, bit for bit."""
    with _preserve_python_and_numpy(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def require_torch_randomness() -> Iterator[None]:
    """While open, torch alone may draw at random: anything else would be drawn once, for all steps.

    Tracing does not advance torch's generators; if the forward seeds them, they are restored.

    Raises:
        CaptureError: the generator of Python or of numpy has been drawn from; both are restored first.
    """
    with _preserve_python_and_numpy(), torch.random.fork_rng([]):
        before = _states()
        yield
        drawn = [name for name, state in _states().items() if state != before[name]]
        if drawn:
            raise CaptureError(
                f"expected a forward that draws at random with torch alone, found that it draws with "
                f"{' and '.join(drawn)}: a step is captured once, and what is drawn then would be in all steps. Draw "
                f"with torch (and torch.where instead of an if), or where the batch is made, as a tensor of it; "
                f"or turn off what draws (layers skipped at random, masks of SpecAugment)"
            )


@contextlib.contextmanager
def _preserve_python_and_numpy() -> Iterator[None]:
    plain, array = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(array)


def _states() -> dict[str, bytes]:
    return {"Python's random": pickle.dumps(random.getstate()), "numpy.random": pickle.dumps(np.random.get_state())}
