"""Modules that another open step trains, and that a step's ``forward`` uses: their description for a capture.

Such a model is traced next to the step's own, on fake tensors too. Its parameters are read and get no gradient, though
gradients flow through it; its buffers are written as they would be by a call of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import nn

from zerofx.capture.layers import find_units
from zerofx.errors import UsageError
from zerofx.ir.buckets import Slot
from zerofx.ir.casts import ComputeDtype
from zerofx.ir.parameters import ParameterInfo, Strides, parameter_infos
from zerofx.ir.tensor_parts import named_buffers


@dataclass(frozen=True)
class SharedModel:
    """A model of another step.

    ``name`` is the prefix of all its names in the step that reads it; no name of that step's own model has it.
    ``compute_dtype`` and ``strides`` are as for ``capture``: how it is computed there. ``held_in``: the dtype in which
    its own step stores it. ``slices``: the parameters that are in slices there, by their names. ``in_buckets``: whether
    that step has taken it over; until then its parameters are where its modules have them. ``refusal`` says why it
    cannot be read; empty where it can.
    """

    name: str
    model: nn.Module
    compute_dtype: ComputeDtype = None
    held_in: ComputeDtype = None
    strides: Strides = field(default_factory=lambda: MappingProxyType({}))
    slices: Mapping[str, Sequence[Slot]] = field(default_factory=lambda: MappingProxyType({}))
    in_buckets: bool = False
    refusal: str = ""

    def check(self) -> None:
        """Check that it can be read.

        Raises:
            UsageError: it cannot.
        """
        if self.refusal:
            raise UsageError(self.refusal)

    def full_name(self, name: str) -> str:
        """The name of a parameter, buffer or module in the step that reads it."""
        return f"{self.name}.{name}" if name else self.name

    def parameters(self) -> tuple[ParameterInfo, ...]:
        """The parameters that are read from buckets, none of them trained here."""
        return tuple(self._infos(self.compute_dtype))

    def storage_parts(self) -> Mapping[str, Sequence[ParameterInfo]]:
        """The storage of each parameter in its own step, by name: the parameter as one, or its slices in order."""
        slices = {self.full_name(name): slots for name, slots in self.slices.items()}
        return {
            info.name: [self._slice(info, slot) for slot in slices[info.name]] if info.name in slices else [info]
            for info in self._infos(self.held_in)
        }

    def _slice(self, info: ParameterInfo, slot: Slot) -> ParameterInfo:
        name = self.full_name(slot.name)
        return replace(
            info, name=name, aliases=(name,), shape=slot.shape, stride=slot.stride, whole=info.name,
            first_row=slot.first_row,
        )  # fmt: skip

    def _infos(self, compute_dtype: ComputeDtype) -> Iterator[ParameterInfo]:
        for info in parameter_infos(self.model, compute_dtype, self.strides) if self.in_buckets else ():
            name, aliases = self.full_name(info.name), tuple(map(self.full_name, info.aliases))
            yield replace(info, name=name, aliases=aliases, requires_grad=False, lent=True)

    def units(self) -> Iterator[str]:
        """Its repeated layers."""
        return map(self.full_name, find_units(self.model))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Buffers by all of their names."""
        return {self.full_name(name): b for name, b in named_buffers(self.model, remove_duplicate=False)}
