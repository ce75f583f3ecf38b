"""ATen operators that an optimizer may use on a flat shard: those whose result at i depends on inputs at i only."""

from __future__ import annotations

from typing import Any, Final

import torch

from zerofx.torch_private.operators import OpOverload, base_name, schema_of

# Elementwise, though not tagged as pointwise: copies, casts and fills.
_COPIES_AND_FILLS: Final = frozenset({"copy_", "_to_copy", "fill_", "zero_"})
_FUSED: Final = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_foreach_add_"})
_FILLS: Final = {
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
_FILL_ARGUMENT: Final = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
_UNINITIALIZED: Final = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})


def is_creation(op: OpOverload[..., Any]) -> bool:
    """True if ``op`` makes a tensor of one value, or of none."""
    name = base_name(op)
    return name in _FILLS or name in _FILL_ARGUMENT or name in _UNINITIALIZED


def is_filled_with_argument(op: OpOverload[..., Any]) -> bool:
    """True if a creation operator is given the value that it fills with."""
    return base_name(op) in _FILL_ARGUMENT


def fill_value(op: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
    """The value a creation operator fills with; None for memory that is not initialised."""
    name = base_name(op)
    return args[_FILL_ARGUMENT[name]] if name in _FILL_ARGUMENT else _FILLS.get(name)


def functional(op: OpOverload[..., Any]) -> OpOverload[..., Any]:
    """The overload that returns what ``op`` would write in place or to ``out``; ``op`` itself if there is none."""
    if not schema_of(op).is_mutable:
        return op
    wanted = [str(a.type) for a in schema_of(op).arguments if not a.is_out]
    packet = getattr(torch.ops.aten, base_name(op).rstrip("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        candidate: OpOverload[..., Any] = getattr(packet, overload)
        if not schema_of(candidate).is_mutable and [str(a.type) for a in schema_of(candidate).arguments] == wanted:
            return candidate
    return op


def elementwise_obstacle(op: OpOverload[..., Any], *, fused: bool) -> str | None:
    """None for an operator that may run on a flat shard, else the reason why it may not."""
    name = base_name(op)
    if fused and name in _FUSED:
        return None
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "draws random numbers, which differ between a flat shard and whole parameters"
    if torch.Tag.pointwise in op.tags or name in _COPIES_AND_FILLS or torch.Tag.pointwise in functional(op).tags:
        return None
    if name == "where" and len(schema_of(op).arguments) == 3:  # of numbers: no overload of those has the tag
        return None
    if name == "_local_scalar_dense":
        return "reads a single value out of a whole tensor"
    if "_foreach_" in name:
        return "works on lists of tensors, and cannot be taken apart: use the methods of a single tensor (p.mul_)"
    return "is not elementwise: it can mix the elements of a tensor, and a flat shard holds pieces of many parameters"
