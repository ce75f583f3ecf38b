"""Stand-ins, in a traced forward, for parameters that consist of several tensors.

One that flattens is made again of other parts, by its own class. One with memory of its own and attributes, as
``bitsandbytes.nn.Params4bit`` is, cannot be: its class asks for real memory. For such a parameter stands a tensor of a
subclass of its class, with its attributes: forward may ask for its class, call its methods and read its state. What is
computed with it is computed with what stands for its memory, which alone is in the graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch

from zerofx.errors import CaptureError
from zerofx.ir.tensor_parts import class_of, is_record, parts_below
from zerofx.torch_private.dispatch import without_torch_functions
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import IS_PARAMETER, make_wrapper

_MEMORY = "_memory"


class _Traced:
    """Comes before the class that the parameter has."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_functions():
            return func(*_unwrap(args), **_unwrap(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_unwrap(args), **_unwrap(kwargs or {}))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The tensor itself, where it is so already: a library may make another parameter of the same memory."""
        memory = vars(self)[_MEMORY]
        if memory.to(*args, **kwargs) is memory:
            return self
        raise CaptureError(
            f"expected a parameter in few bits to stay as it is in forward, found that it is moved or cast, with "
            f"{type(self).__name__}.to({', '.join(map(str, (*args, *kwargs.values())))}): do so before zerofx.compile"
        )


def rebuild(tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A stand-in for ``tensor`` in a model's forward, made of other ``parts`` of the same shapes."""
    if (memory := parts.get("")) is not None:
        layout = {"strides": memory.stride(), "dtype": memory.dtype, "device": memory.device}
        traced: torch.Tensor = make_wrapper(_stand_in_class(class_of(tensor)), memory.shape, **layout)
        vars(traced).update({_MEMORY: memory, **_replace_tensors(vars(tensor), parts)})
        return traced
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {
        name: parts[name] if name in parts else rebuild(getattr(tensor, name), parts_below(name, parts))
        for name in names
    }
    unflatten = class_of(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    whole: torch.Tensor = unflatten(inner, context, tensor.shape, tensor.stride())
    setattr(whole, IS_PARAMETER, True)
    return whole


@functools.cache
def _stand_in_class(kind: type) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (_Traced, kind), names)


def _unwrap(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: vars(leaf)[_MEMORY] if isinstance(leaf, _Traced) else leaf, tree)


def _replace_tensors(attributes: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Attributes of a parameter, or of a record in it, with other tensors."""
    replaced: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor) and name in parts:
            replaced[name] = parts[name]
        elif is_record(name, value) and (inner := parts_below(name, parts)):
            replaced[name] = copy.copy(value)
            vars(replaced[name]).update(_replace_tensors(vars(value), inner))
        else:
            replaced[name] = value
    return replaced
