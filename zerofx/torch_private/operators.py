"""Operators: their class, trees of their arguments, and ways of calling some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry

from zerofx.torch_private.versions import TORCH

pytree = _pytree

Argument = torch._C.Argument
"""An argument in an operator's schema."""

Schema = torch._C.FunctionSchema
"""What an operator takes and gives: ``name``, ``arguments``, ``returns``, ``is_mutable``."""

_ONE_BY_ONE = torch._C.DispatchKey.CompositeExplicitAutograd


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[Sequence[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]:
    """A tree's leaves, each with its path, and the structure of the tree.

    Children of a class that is registered without names, as outputs of older transformers are, have numbers.
    """
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError:
        leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
        return [((pytree.SequenceKey(number),), leaf) for number, leaf in enumerate(leaves)], spec


def schema_of(op: OpOverload[..., Any]) -> Schema:
    """An operator's schema."""
    return op._schema


def base_name(op: OpOverload[..., Any]) -> str:
    """``mul_`` for ``aten::mul_.Tensor``, ``zerofx::wait`` for ``zerofx::wait.default``: ATen has no prefix."""
    return str(op._schema.name).removeprefix("aten::")


def is_out(op: OpOverload[..., Any]) -> bool:
    """True if ``op`` writes its results into memory that is passed for them.

    Torch from 2.13 on has a tag for it, which users' operators may have even if their schema does not say so.
    """
    tag = getattr(torch.Tag, "out", None)
    return (tag is not None and tag in op.tags) or any(argument.is_out for argument in op._schema.arguments)


def is_foreach(op: OpOverload[..., Any]) -> bool:
    """True if ``op`` works on lists of tensors, and can be decomposed into an operator for each."""
    return "_foreach_" in op._schema.name and op.has_kernel_for_dispatch_key(_ONE_BY_ONE)


def call_one_by_one(op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that ``is_foreach`` as CPUs do: one tensor at a time, by operators that dispatch modes see."""
    return op._op_dk(_ONE_BY_ONE, *args, **kwargs)


@contextlib.contextmanager
def disable_onednn() -> Iterator[None]:
    """While open, ATen's own kernels run where oneDNN's would: ``torch.backends.mkldnn.flags`` warns of Intel GPUs."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``x @ weight.t() + bias`` by oneDNN, through the one operator that takes dense matrices as they are.

    Args:
        x: ``[rows, inputs]`` in float32, on a CPU.
        weight: ``[outputs, inputs]``, laid out either way.
        bias: ``[outputs]``, or None.

    Returns:
        ``[rows, outputs]``.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def has_autograd_function(name: str) -> bool:
    """True if autograd of C++ has a function of that name, such as ``AddmmBackward0``."""
    return hasattr(torch._C._functions, name)


def flop_count(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The registry's count for a call of a registered operator, with tensors that may be fakes."""
    arguments = _repeat_heads(packet, args) if refuses_grouped_heads() else args
    return int(flop_registry[packet](*arguments, **kwargs, out_val=result))


def refuses_grouped_heads() -> bool:
    """True if the registry cannot count attention with fewer key heads than query heads, as in torch 2.11."""
    return TORCH == (2, 11)


def _repeat_heads(packet: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Keys and values of attention with a head for each query head: kernels compute as if they had them."""
    name = str(packet)
    if "scaled_dot_product" not in name:
        return args
    first = 1 if "backward" in name else 0  # after the gradient
    query, *others = args[first : first + 3]
    repeated = [torch.empty((x.shape[0], query.shape[1], *x.shape[2:]), device="meta") for x in others]
    return [*args[: first + 1], *repeated, *args[first + 3 :]]


GROUPED_BOUNDARY = 16  # bytes, which the rows of a grouped product's operands begin at multiples of
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses_dtypes() -> bool:
    """True if torch's own fakes refuse dtypes that kernels support: to torch 2.14."""
    return TORCH < (2, 15)


def _fake_grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of ``F.grouped_mm`` on fake tensors, after ATen's checks (``native/GroupedMMUtils.h``).

    Up to torch 2.14 fakes refuse it in float32 and float16, so that a forward with it could only be traced as compiled,
    where libraries take another path; and they return rows without their padding bytes.

    Args:
        left: the first operand, [rows, inner] or [groups, rows, inner].
        right: the second, [inner, columns] or [groups, inner, columns]; of ``left``'s dtype.
        offs: the ends of groups along the dimension that is in groups, [groups], unless both operands have a matrix
            each.
        bias: None, the only value that kernels accept.
        out_dtype: the dtype of ``left``, or None.
    """
    dims = (left.dim(), right.dim())
    torch._check(left.dtype == right.dtype and left.dtype in _DTYPES, lambda: f"grouped products of {left.dtype}")
    torch._check(set(dims) <= {2, 3} and left.shape[-1] == right.shape[-2], lambda: f"grouped products of {dims}")
    torch._check((offs is None) == (dims == (3, 3)), lambda: "ends of groups, unless each has a matrix of its own")
    torch._check(bias is None and out_dtype in (None, left.dtype), lambda: "neither bias nor another dtype")
    for operand in (left, right):
        (rows, columns), (down, across) = operand.shape[-2:], operand.stride()[-2:]
        by_columns, by_rows = down == 1 and across >= max(1, rows), across == 1 and down >= max(1, columns)
        torch._check(by_columns or by_rows, lambda: "columns or rows that lie together")
        apart = (across if by_columns else down) * operand.element_size()
        torch._check(apart % GROUPED_BOUNDARY == 0, lambda: "strides should be multiple of 16 bytes")
    ends = offs if offs is not None else left
    shape = (*ends.shape[: dims[0] == dims[1]], left.shape[-2], right.shape[-1])
    padded = -(-shape[-1] * left.element_size() // GROUPED_BOUNDARY) * GROUPED_BOUNDARY // left.element_size()
    strides = (shape[-2] * padded, padded, 1)
    return left.new_empty_strided(shape, strides[-len(shape) :])


if refuses_dtypes():
    torch.library.register_fake("aten::_grouped_mm", _fake_grouped_mm, allow_override=True)
