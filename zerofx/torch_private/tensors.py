"""Tensors: memory orders, stand-ins, subclasses."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TypeVar

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as _suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerofx.errors import InternalError
from zerofx.torch_private.dispatch import without_modes, without_python_dispatcher

Wrapper = TypeVar("Wrapper", bound=torch.Tensor)

is_functional = torch._is_functional_tensor
"""Whether a tensor of no class of its own stands for another one, as those do that functionalization works on."""

without_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass whose functions are those of plain tensors."""


def elementwise_order(*operands: torch.Tensor) -> list[int]:
    """The dimensions of an elementwise kernel's result, the outermost in memory first, for operands of one shape."""
    _check_layouts()
    return _elementwise_order(*operands)


def suggest_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that kernels for images assume of a tensor."""
    _check_layouts()
    return _suggest_memory_format(tensor)


def _elementwise_order(*operands: torch.Tensor) -> list[int]:
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(*operands)[0]
    return order


@functools.cache
def _check_layouts() -> None:
    """Compare both functions with kernels' results, once in a process: if they differ, strides would be misread.

    Raises:
        InternalError: they differ.
    """
    with without_modes(), without_python_dispatcher(), torch._C.DisableTorchFunction(), torch.no_grad():
        transposed = torch.empty_strided((2, 3, 4), (1, 8, 2), device="cpu")
        others = (torch.empty((2, 3, 4), device="cpu"), torch.empty((2, 3, 1), device="cpu").expand(2, 3, 4))
        pairs = [(transposed, other) for other in others] + [(other, transposed) for other in others]
        agree = [(first + second).permute(_elementwise_order(first, second)).is_contiguous() for first, second in pairs]
        for layout in (torch.contiguous_format, torch.channels_last):
            image = torch.empty((2, 3, 4, 4), device="cpu", memory_format=layout)
            pooled = torch.nn.functional.max_pool2d(image, 2)
            agree += [_suggest_memory_format(image) is layout, pooled.is_contiguous(memory_format=layout)]
    if not all(agree):
        raise InternalError(
            f"expected torch's kernels to lay results out as torch's Python says, which they do in torch 2.13, found "
            f"other strides with torch {torch.__version__}: a step would misread what they give. Please report it"
        )


def is_traced(value: object) -> bool:
    """True if it is a tensor that stands for another while a model is traced, and has no values."""
    return isinstance(value, FakeTensor | FunctionalTensor)


def use_mode_of(fake: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """While open, new tensors are fakes if ``fake`` is."""
    return fake.fake_mode if isinstance(fake, FakeTensor) else contextlib.nullcontext()


def empty_like_fake(
    fake: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A contiguous tensor of the mode of ``fake``.

    It is made in that mode, where torch never looks for a GPU: to 2.12 ``fake.new_empty`` does.
    """
    with use_mode_of(fake):
        return torch.empty(shape, dtype=dtype, device=device)


def flattens(tensor: torch.Tensor, kind: type) -> bool:
    """True if a tensor of class ``kind`` says of which others it consists; torch's own have meanings of their own."""
    return is_traceable_wrapper_subclass(tensor) and not kind.__module__.startswith("torch.")


def make_wrapper(kind: type[Wrapper], shape: torch.Size, **like: Any) -> Wrapper:
    """A tensor of a subclass with a ``__torch_dispatch__``, without memory; ``like``: dtype, device, strides, ..."""
    wrapper: Wrapper = kind._make_wrapper_subclass(kind, shape, **like)
    return wrapper


def version_of(tensor: torch.Tensor) -> int:
    """A counter that increases when the tensor, or another in the same memory, is changed in place."""
    return tensor._version


def memory_of(tensor: torch.Tensor) -> int:
    """An id shared by tensors in the same memory while one of them is alive, also for fakes."""
    return int(tensor.untyped_storage()._cdata)


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if the user has registered hooks on the tensor's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


can_take_data_of = torch._has_compatible_shallow_copy_type
"""Whether a tensor may be given another's ``data``: ``module.to()`` asks before it assigns."""

negated_view = torch._neg_view
"""A view with the negative bit, as the imaginary part of a conjugated tensor has it."""

IS_PARAMETER = "_is_param"
"""The attribute that makes a tensor of another class an ``nn.Parameter``."""


def mark_as_parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Make ``tensor`` a parameter: like ``nn.Parameter`` of a tensor subclass, but without a copy."""
    setattr(tensor, IS_PARAMETER, True)
    return tensor.requires_grad_(requires_grad)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share which lie in one storage, with values or without."""
    return int(tensor.untyped_storage()._cdata)
