"""Operators: their class, trees of their arguments, and how some are called."""

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


def flattened_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[Sequence[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]:
    """A tree's leaves, each with its path, and the form of the tree.

    Children of a class that is registered without their names, as outputs of older transformers are, have numbers.
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
    """``mul_`` for ``aten::mul_.Tensor``, ``zerofx::wait`` for ``zerofx::wait.default``: nothing stands for ATen."""
    return str(op._schema.name).removeprefix("aten::")


def is_out(op: OpOverload[..., Any]) -> bool:
    """Whether ``op`` writes its results into memory that it is given for them.

    Torch from 2.13 on has a tag for it, which users' operators may have whose schema does not say so.
    """
    tag = getattr(torch.Tag, "out", None)
    return (tag is not None and tag in op.tags) or any(argument.is_out for argument in op._schema.arguments)


def is_foreach(op: OpOverload[..., Any]) -> bool:
    """Whether ``op`` works on lists of tensors, and can be taken apart into an operator for each."""
    return "_foreach_" in op._schema.name and op.has_kernel_for_dispatch_key(_ONE_BY_ONE)


def call_one_by_one(op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that ``is_foreach`` as CPUs do: one tensor at a time, by operators that dispatch modes see."""
    return op._op_dk(_ONE_BY_ONE, *args, **kwargs)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """ATen's own kernels, where it has others by oneDNN."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.t() + bias`` by oneDNN, through the one operator that gives it dense matrices as they are.

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
    """Whether autograd of C++ has a function of that name, such as ``AddmmBackward0``."""
    return hasattr(torch._C._functions, name)


def flop_count(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """What the registry counts for a call of an operator that it has, with tensors that may be fakes."""
    arguments = _with_as_many_heads(packet, args) if refuses_grouped_heads() else args
    return int(flop_registry[packet](*arguments, **kwargs, out_val=result))


def refuses_grouped_heads() -> bool:
    """Whether the registry counts no attention whose keys have fewer heads than its queries, as in torch 2.11."""
    return TORCH == (2, 11)


def _with_as_many_heads(packet: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Keys and values of attention with a head for each of the queries: the kernels compute as if they had them."""
    name = str(packet)
    if "scaled_dot_product" not in name:
        return args
    first = 1 if "backward" in name else 0  # after the gradient
    query, *others = args[first : first + 3]
    repeated = [torch.empty((x.shape[0], query.shape[1], *x.shape[2:]), device="meta") for x in others]
    return [*args[: first + 1], *repeated, *args[first + 3 :]]
