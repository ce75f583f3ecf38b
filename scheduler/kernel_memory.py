"""What an operator takes and gives back inside its kernel, found by calling it: for those of ATen that have no rule.

The call is made on the CPU at hand with values that are made up, once for each combination of shapes, strides, dtypes
and other arguments, and the profiler's record of its allocations is read. Nothing that a caller can see changes: the
tensors are the call's own, and random generators are put back.

A call on more than ``LARGEST_CALL`` bytes, or of more steps than ``MOST_STEPS``, is made on smaller tensors: every
large dimension is divided by the same number, and what is found grows with the bytes of inputs and outputs. That is
taken for true only where the outputs are smaller by as much.

While a profiler of the user's runs, beside which there can be no other, and where memory for a call is short, nothing
is found of calls that have not been made before; that is not remembered.

Not covered, and so ``None``: operators that are not ATen's (their kernels may do anything), calls that fail on values
that are made up, and large ones whose outputs do not follow their inputs' sizes. Where an operator's memory depends on
values (``linalg_matrix_exp``: on the norm), what is found is that for large, well-conditioned matrices, or for values
between 0 and 1.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from zerofx.peaks import CpuPeak
from zerofx.scheduler.storage import tensors_in, tensors_of
from zerofx.torch_private import is_profiling, without_modes

LARGEST_CALL = 2**26  # bytes of inputs and outputs: some tenths of a second for what reads and writes them once
MOST_STEPS = 2**28  # elements times the last dimension, which operators of linear algebra take: matrices of 640 x 640
_PRODUCTS_A_STEP = 8  # of a convolution, which takes less time for one
_SMALLEST_DIM = 128  # what a dimension is not made smaller than
_CUBIC = ("linalg_", "_linalg_", "cholesky_", "lu_", "cdist", "_cdist", "_euclidean_dist", "_trilinear")
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True)
class _Like:
    """A tensor but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements of the memory that it reaches over."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def smaller(self, by: int) -> _Like:
        """With every large dimension divided, and strides in the same order."""
        shape = tuple(_divided(size, by) for size in self.shape)
        if shape == self.shape:
            return self
        stride, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            if self.stride[dim]:
                stride[dim], step = step, step * max(1, shape[dim])
        return replace(self, shape=shape, stride=tuple(stride))


@dataclass(frozen=True)
class _Call:
    """A call but for values: ``leaves`` are its arguments, flat, a ``_Like`` for each tensor.

    ``kernels`` is what ATen chooses between kernels by: threads, whether there is oneDNN, and whether they have to be
    deterministic.
    """

    target: OpOverload
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    made: tuple[_Like, ...]
    kernels: tuple[int, bool, bool]

    @property
    def num_bytes(self) -> int:
        given = sum(leaf.num_bytes for leaf in self.leaves if isinstance(leaf, _Like))
        return given + sum(one.num_bytes for one in self.made)

    @property
    def num_steps(self) -> int:
        if self.target in _CONVOLUTIONS:
            is_backward = self.target is torch.ops.aten.convolution_backward.default
            result, filters = (self.leaves[0], self.leaves[2]) if is_backward else (self.made[0], self.leaves[1])
            return int(math.prod(result.shape) * math.prod(filters.shape[1:])) // _PRODUCTS_A_STEP
        if not _is_cubic(self.target):
            return 0
        sized = [one for one in (*self.leaves, *self.made) if isinstance(one, _Like) and one.shape]
        return max((math.prod(one.shape) * one.shape[-1] for one in sized), default=0)

    @property
    def is_small(self) -> bool:
        return self.num_bytes <= LARGEST_CALL and self.num_steps <= MOST_STEPS

    def smaller(self, by: int) -> _Call:
        leaves = tuple(leaf.smaller(by) if isinstance(leaf, _Like) else leaf for leaf in self.leaves)
        return replace(self, leaves=leaves, made=tuple(one.smaller(by) for one in self.made))


def measured_bytes(node: fx.Node) -> int | None:
    """Bytes that an operator on CPU tensors takes and gives back inside; None where it cannot be found, or not yet."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return measured_call_bytes(target, list(args), dict(kwargs), tensors_of(node))


def measured_call_bytes(
    target: OpOverload, args: list[Any], kwargs: dict[str, Any], made: tuple[Tensor, ...], *, whole: bool = False
) -> int | None:
    """``measured_bytes`` of a call of one of ATen's operators on fake tensors that gives tensors like ``made``.

    ``whole``: None where the call would have to be made on smaller tensors.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    call = _Call(
        target,
        tuple(_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        structure, tuple(map(_like, made)),
        (torch.get_num_threads(), bool(torch.backends.mkldnn.enabled), torch.are_deterministic_algorithms_enabled()),
    )  # fmt: skip
    if whole and not call.is_small:
        return None
    try:
        return _measured(call)
    except TypeError:  # an argument that cannot be hashed: sizes that are symbols
        return None
    except _NotYetError:
        return None


class _NotYetError(Exception):
    """What a call takes cannot be found at the moment: an exception, since it is not to be remembered."""


class _ValuesError(Exception):
    """There are no such values, or the operator does not take them: it will not another time."""


@functools.lru_cache(maxsize=4096)
def _measured(call: _Call) -> int | None:
    if is_profiling():
        raise _NotYetError
    tried = call
    for power in range(1, 24):
        if tried.is_small:
            break
        tried = call.smaller(2**power)
    else:
        return None
    with without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            _run(tried, contextlib.nullcontext())  # the first call may set things up that stay
            peak = CpuPeak()
            made = _run(tried, peak)
        except _ValuesError:
            return None
        except (MemoryError, RuntimeError) as error:  # no memory, or the profiler's own
            raise _NotYetError from error
    if made is None:
        return None
    found = max(0, peak.num_bytes - made)
    if tried is call:
        return found
    return math.ceil(found * (call.num_bytes / tried.num_bytes))


def _run(call: _Call, inside: AbstractContextManager[object]) -> int | None:
    """Make a call ``inside`` of something; bytes of the outputs' memory, None where they are not those expected.

    Raises:
        _ValuesError: the call fails on values that are made up.
        MemoryError, RuntimeError: it fails for a reason that may pass.
    """
    with _refusing_values():
        given = [_values(leaf, call.target) if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(given, call.structure)
    run: Callable[..., Any] = call.target
    with inside, _refusing_values():
        made = run(*args, **kwargs)
    outputs = list(tensors_in(made))
    if [tuple(one.shape) for one in outputs] != [one.shape for one in call.made]:
        return None
    before = {_memory(one) for one in given if isinstance(one, Tensor)}
    return sum({_memory(one): one.untyped_storage().nbytes() for one in outputs if _memory(one) not in before}.values())


@contextlib.contextmanager
def _refusing_values() -> Iterator[None]:
    """What fails inside does so because of values that are made up, unless memory is short."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        # torch's allocator on CPU raises a plain RuntimeError (torch 2.13).
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        raise _ValuesError from error


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _values(like: _Like, target: OpOverload) -> Tensor:
    """Numbers between 0 and 1, and square matrices that can be inverted for linear algebra; the first of everything
    where integers are asked for, which linear algebra counts from one; conditions that hold."""
    if like.dtype == torch.bool:
        flat = torch.ones(like.span, dtype=torch.bool)
    elif like.dtype.is_complex:
        parts = torch.linspace(0.25, 0.75, 2 * like.span, dtype=like.dtype.to_real())
        flat = torch.view_as_complex(parts.view(-1, 2))
    elif like.dtype.is_floating_point:
        flat = torch.linspace(0.25, 0.75, like.span, dtype=like.dtype)
    else:
        flat = torch.full((like.span,), int("lu_" in target._schema.name or "ldl_" in target._schema.name)).to(
            like.dtype
        )
    tensor = flat.as_strided(like.shape, like.stride)
    is_matrix = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and 0 not in like.stride
    if is_matrix and like.dtype.is_floating_point and _is_cubic(target):
        tensor.diagonal(0, -2, -1).add_(tensor.shape[-1])
    return tensor


def _like(tensor: Tensor) -> _Like:
    return _Like(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _is_cubic(target: OpOverload) -> bool:
    return target._schema.name.removeprefix("aten::").startswith(_CUBIC)


def _divided(size: int, by: int) -> int:
    return max(_SMALLEST_DIM, size // by) if size > _SMALLEST_DIM else size
