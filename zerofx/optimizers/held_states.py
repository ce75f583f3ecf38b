"""The states that an optimizer holds per parameter, by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.errors import OptimizerError
from zerofx.ir.buckets import Bucket
from zerofx.optimizers.outside import same


@dataclass(frozen=True)
class HeldState:
    """Optimizer states of the parameters of one bucket: scalars that they share, and a tensor of each.

    Of a parameter in slices it is the whole tensor, for each slice's bucket. Of parameters that are updated whole,
    ``entries`` are the optimizer's own, by name.
    """

    scalars: dict[str, Any]
    flat: dict[str, list[torch.Tensor]]
    entries: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self.scalars) | frozenset(self.flat)


def collect_states(
    bucket: Bucket,
    of_parameters: Mapping[str, Mapping[str, Any]],
    shapes_of: Mapping[str, tuple[int, ...]],
    scalars: frozenset[str],
) -> HeldState:
    """Collect the states of a bucket's parameters, by state: ``of_parameters`` are the optimizer's entries, by name.

    ``shapes_of`` are those of the model's parameters, of which the bucket may hold slices; ``scalars`` are states that
    the parameters share.

    Raises:
        OptimizerError: the parameters have states that cannot be updated together.
    """
    held = HeldState({}, {}, dict(of_parameters))
    entries = [of_parameters[slot.source] for slot in bucket.slots]
    shapes = [shapes_of[slot.source] for slot in bucket.slots]
    for name in dict.fromkeys(name for entry in entries for name in entry):
        values = [entry.get(name) for entry in entries]
        there = [value for value in values if value is not None]
        if not there:
            continue  # no state at all: SGD without momentum keeps momentum_buffer=None
        if len(there) < len(values):
            without = [s.source for s, value in zip(bucket.slots, values, strict=True) if value is None]
            raise OptimizerError(
                f"expected state {name!r} for every parameter of {bucket.name}, found none for {without}: parameters "
                f"that are updated together must have been trained together; load a state of this very model"
            )
        if name in scalars:
            _check_shapes(bucket, name, values, None)
            if not all(same(value, there[0]) for value in there):
                distinct = list(
                    dict.fromkeys(str(value.item() if isinstance(value, torch.Tensor) else value) for value in there)
                )
                raise OptimizerError(
                    f"expected one value of {name!r} for all parameters of {bucket.name}, found "
                    f"{', '.join(distinct)}: they are updated together"
                )
            held.scalars[name] = values[0]
            continue
        _check_shapes(bucket, name, values, shapes)
        held.flat[name] = [value for value in values if isinstance(value, torch.Tensor)]
    return held


def _check_shapes(bucket: Bucket, name: str, values: list[Any], shapes: list[tuple[int, ...]] | None) -> None:
    """Refuse a state whose values have not these shapes; without ``shapes`` it is a number, of which each has one."""
    for index, (slot, value) in enumerate(zip(bucket.slots, values, strict=True)):
        expected = shapes[index] if shapes is not None else ()
        if isinstance(value, torch.Tensor):
            fits = tuple(value.shape) == expected if shapes is not None else value.numel() == 1
        else:
            fits = shapes is None
        if not fits:
            shown = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise OptimizerError(
                f"expected state {name!r} of {slot.source} to have shape {list(expected)}, found {shown}: load a state "
                f"of this very model"
            )
