"""Memory that an operator takes inside its kernel, and that its outputs keep: found by running the call.

Kernels on CPU hold memory where one would not look. A number among tensors becomes a tensor, operands of mixed dtypes
are converted, layouts are copied, each thread has a buffer of its own; and an output may keep more than it shows, as
the mean of ``mse_loss`` keeps the memory of all the squares. No list of such things is ever whole. So the call is made,
on the CPU at hand, with values that are made up, once for each combination of shapes, strides, dtypes and other
arguments, and the profiler's record of its allocations is read. Nothing that a caller can see changes: the tensors are
the call's own, and random generators are put back. What a call takes that would take long to make is told from smaller
ones (``scheduler/cost/cpu/smaller_calls.py``).

While a profiler of the user's runs, next to which there can be no other, and where memory for a call is short, nothing
is known of calls that have not been made before; that is not remembered.

Not covered, and so ``None``: operators of others than ATen and zerofx (their kernels may do anything), calls that fail
on values that are made up, and outputs whose shapes depend on values. Where an operator's memory depends on values
(``linalg_matrix_exp``: on the norm), what is known is that for large, well-conditioned matrices, for values between 0
and 1, or for conditions that all hold. Where it depends on integers, the table of operators says which to try
(``Operator.integers``), and the most is what counts. Operators of zerofx take the same for all
(``zerofx/ir/op_kernels/as_aten.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.errors import InternalError
from zerofx.ir.aliasing import tensors_in
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.cost.cpu.calls import KernelMemory, Like, OperatorCall, call_of, dispatch_state
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.scheduler.cost.cpu.smaller_calls import approximate, extrapolate, parts_of, two_smaller
from zerofx.torch_private.dispatch import without_modes
from zerofx.torch_private.operators import OpOverload
from zerofx.torch_private.profiler import is_profiling
from zerofx.torch_private.tensors import memory_of, negated_view


def kernel_memories(nodes: Iterable[fx.Node]) -> dict[fx.Node, KernelMemory | None]:
    """Memory of the calls of some operators on CPU tensors; None where it cannot be known, or not yet."""
    calls = {node: call_of(node) for node in nodes}
    known = call_memories(call for call in calls.values() if call is not None)
    return {node: None if call is None else _look_up(known, call) for node, call in calls.items()}


def call_memories(calls: Iterable[OperatorCall]) -> Mapping[OperatorCall, KernelMemory | None]:
    """The same of calls; what others take that are known, too."""
    known = _memory_cache(dispatch_state())
    fresh: dict[OperatorCall, None] = {}
    for call in calls:
        with contextlib.suppress(TypeError):  # an argument that cannot be hashed: sizes that are symbols
            if call not in known:
                fresh[call] = None
    with contextlib.suppress(_NotYetError):
        _learn(list(fresh))
    return known


def _look_up(known: Mapping[OperatorCall, KernelMemory | None], call: OperatorCall) -> KernelMemory | None:
    with contextlib.suppress(TypeError):
        return known.get(call)
    return None


class _NotYetError(Exception):
    """Memory of a call cannot be found at the moment: an exception, so that it is not remembered."""


class _ValuesError(Exception):
    """There are no such values, or the operator does not take them: it will not another time."""


@functools.cache
def _memory_cache(_dispatch_state: tuple[object, ...]) -> dict[OperatorCall, KernelMemory | None]:
    """Memory of calls in this process, cached by ATen's inputs to its choice of kernels."""
    return {}


def _learn(calls: Sequence[OperatorCall]) -> None:
    """Make calls that nothing is known of, or smaller ones, as many as can be under one profiler.

    Raises:
        _NotYetError: it cannot be found at the moment what they take.
    """
    known = _memory_cache(dispatch_state())
    parts = {call: parts_of(call) for call in calls if not call.is_quick}
    pairs = {call: (call, call) if call.is_quick else two_smaller(call) for call in calls if not parts.get(call)}
    asked = [*[pair.calls for pair in parts.values() if pair is not None], *[pair for pair in pairs.values() if pair]]
    known.update(_records(list(dict.fromkeys(entry for pair in asked for entry in pair if entry not in known))))
    for call, two in parts.items():
        if two is not None:
            known[call] = two.add_up(*[known[element] for element in two.calls])
    for call, pair in pairs.items():
        first, second = (None, None) if pair is None else (known[pair[0]], known[pair[1]])
        if call.is_quick or (first is not None and first == second):
            known[call] = first
        else:
            extrapolation = extrapolate(call, _records)
            known[call] = extrapolation or (_record(call) if call.is_feasible else approximate(call, _records))


def _record(call: OperatorCall) -> KernelMemory | None:
    known = _memory_cache(dispatch_state())
    if call not in known:
        known[call] = _records([call])[call]
    return known[call]


def _records(calls: Sequence[OperatorCall]) -> dict[OperatorCall, KernelMemory | None]:
    """Memory of each call; None for one that fails, or whose results are not as expected.

    Raises:
        _NotYetError: it cannot be found at the moment.
    """
    if not calls:
        return {}
    if is_profiling():
        raise _NotYetError
    with without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            # The first call of an operator may set things up that stay.
            ready = [(call, arguments) for call in calls for arguments in _try_arguments(call)]
            peak = CpuPeak()
            with peak:
                sizes = [_run(call, arguments, peak) for call, arguments in ready]
        except InternalError:
            raise
        except (MemoryError, RuntimeError) as error:  # no memory, or the profiler's own
            raise _NotYetError from error
    memories: dict[OperatorCall, KernelMemory | None] = dict.fromkeys(calls)
    for (call, _), results, most in zip(ready, sizes, peak.parts, strict=True):
        if results is not None:
            excess = tuple(
                max(0 if shape == like.shape else -like.num_bytes, size - like.num_bytes)
                for (size, shape), like in zip(results, call.results, strict=True)
            )
            inside = max(0, most - sum(size for size, _ in results))
            before = memories[call]
            memories[call] = KernelMemory(inside if before is None else max(inside, before.inside), excess)
    return memories


Arguments = tuple[list[Any], dict[str, Any]]


def _try_arguments(call: OperatorCall) -> list[Arguments]:
    """The arguments of a call with which it has been made once, for each of the integers that may make a difference;
    none if it fails with some."""
    integers = facts_of(call.target).integers
    try:
        with _refuse_values():
            arguments = [_arguments(call, number) for number in ((0,) if integers is None else integers(call.args))]
        return [] if any(_run(call, entry, None) is None for entry in arguments) else arguments
    except _ValuesError:
        return []


def _arguments(call: OperatorCall, integer: int) -> Arguments:
    return call.substitute(lambda like: _values(like, call.target, integer))


def _run(call: OperatorCall, arguments: Arguments, peak: CpuPeak | None) -> list[tuple[int, tuple[int, ...]]] | None:
    """Make a call, as a part of ``peak``; bytes of each output's own memory, 0 where it has none, and its shape. None
    if the call fails, or an output has another shape than expected and is not empty.

    Raises:
        MemoryError, RuntimeError: it fails for a reason that may pass.
    """
    args, kwargs = arguments
    given = {memory_of(entry) for entry in tensors_in([*args, *kwargs.values()])}
    with peak.part() if peak is not None else contextlib.nullcontext():
        try:
            with _refuse_values():
                results: Any = call.target(*args, **kwargs)
        except _ValuesError:
            return None
    outputs = list(tensors_in(results))
    shapes = [tuple(element.shape) for element in outputs]
    if len(shapes) != len(call.results) or any(
        shape != like.shape and 0 not in shape for shape, like in zip(shapes, call.results, strict=True)
    ):
        return None
    sizes = []
    for output in outputs:
        sizes.append(0 if memory_of(output) in given else output.untyped_storage().nbytes())
        given.add(memory_of(output))
    return list(zip(sizes, shapes, strict=True))


@contextlib.contextmanager
def _refuse_values() -> Iterator[None]:
    """Turn failures inside into `_ValuesError`, since the values are made up, unless memory is short."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        # torch's allocator on CPU raises a plain RuntimeError (torch 2.13).
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        raise _ValuesError from error


def _values(like: Like, target: OpOverload, integer: int) -> Tensor:
    """Numbers between 0 and 1, and square matrices that can be inverted for linear algebra; conditions that hold;
    ``integer`` where integers are asked for."""
    if like.dtype == torch.bool:
        flat = torch.ones(like.span, dtype=torch.bool, device="cpu")
    elif like.dtype.is_complex:
        parts = torch.linspace(0.25, 0.75, 2 * like.span, dtype=like.dtype.to_real(), device="cpu")
        flat = torch.view_as_complex(parts.view(-1, 2))
    elif like.dtype.is_floating_point and like.dtype.itemsize == 1:
        # Little is computed in these.
        return _values(Like(like.shape, like.stride, torch.float32), target, integer).to(like.dtype)
    elif like.dtype.is_floating_point:
        flat = torch.linspace(0.25, 0.75, like.span, dtype=like.dtype, device="cpu")
    else:
        flat = torch.full((like.span,), integer, dtype=torch.int64, device="cpu").to(like.dtype)
    tensor = flat.as_strided(like.shape, like.stride)
    is_matrix = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and 0 not in like.stride
    if is_matrix and like.dtype.is_floating_point and facts_of(target).is_cubic:
        tensor.diagonal(0, -2, -1).add_(tensor.shape[-1])
    tensor = tensor.conj() if like.is_conjugated else tensor
    return negated_view(tensor) if like.is_negated else tensor
