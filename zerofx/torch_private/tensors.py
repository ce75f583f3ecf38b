"""Tensors: memory orders, stand-ins, subclasses."""

from __future__ import annotations

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor

is_functional = torch._is_functional_tensor
"""Whether a tensor of no class of its own stands for another one, as those do that functionalization works on."""

without_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass whose functions are those of plain tensors."""


def elementwise_order(*operands: torch.Tensor) -> list[int]:
    """The dimensions of what an elementwise kernel makes of operands of one shape, the outermost in memory first."""
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(*operands)[0]
    return order


def is_traced(value: object) -> bool:
    """Whether it is a tensor that stands for another while a model is traced, and has no values."""
    return isinstance(value, FakeTensor | FunctionalTensor)


def without_memory(
    kind: type[torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of a subclass with a ``__torch_dispatch__`` that has no memory."""
    made: torch.Tensor = kind._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    return made
