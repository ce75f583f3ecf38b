"""A model's parameters and buffers as fake tensors while it is traced, those of tensor subclasses in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.capture.wholes import rebuild
from zerofx.ir.casts import ComputeDtype, cast_of
from zerofx.ir.parameters import Strides
from zerofx.ir.tensor_parts import is_table, parts_of, path_name
from zerofx.torch_private.capture import FakeTensorMode, fake_tensor
from zerofx.torch_private.modules import buffer_table, parameter_table
from zerofx.torch_private.tensors import mark_as_parameter

_REPACKS = "support_avx512bf16_for_cpu"
"""By which layers of bitsandbytes tell whether an evaluation puts their codes in another order, and rounds scales."""

Place = tuple[dict[str, Any], str]
"""Where a stand-in is: an entry of a table of a module."""


@dataclass(frozen=True)
class _Whole:
    """A parameter in parts: its places in ``modules``, and the number of each part among all, by path."""

    real: torch.Tensor
    modules: list[nn.Module]
    places: list[Place]
    numbers: Mapping[str, int]


class TracedParts(nn.Module):
    """The parts of parameters as parameters and buffers of its own, which a trace sees in place of these.

    ``names`` are those of the parts in the step, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._wholes: dict[int, _Whole] = {}
        self._numbers: dict[int, int] = {}  # by the identity of the real part

    def place(self, number: int) -> Place:
        """The place of a part's stand-in."""
        table: dict[str, Any] = parameter_table(self)
        return (table if str(number) in table else buffer_table(self)), str(number)

    def add(
        self,
        name: str,
        real: torch.Tensor,
        module: nn.Module,
        place: Place,
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Have ``real``, a parameter called ``name``, in parts, each a result of ``make`` for the real part."""
        if id(real) not in self._wholes:
            numbers = {}
            for path, part in parts_of(real).items():
                if id(part) not in self._numbers:
                    number = self._numbers[id(part)] = len(self.names)
                    self.names.append(path_name(name, path))
                    table: dict[str, Any] = buffer_table(self) if is_table(part) else parameter_table(self)
                    fake = make(part)
                    table[str(number)] = fake if is_table(part) else mark_as_parameter(fake, requires_grad=False)
                numbers[path] = self._numbers[id(part)]
            self._wholes[id(real)] = _Whole(real, [], [], numbers)
        self._wholes[id(real)].modules.append(module)
        self._wholes[id(real)].places.append(place)

    def places(self) -> dict[int, Place]:
        """The place of each real part's stand-in, by its identity."""
        return {part: self.place(number) for part, number in self._numbers.items()}

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While open, modules have the parameters, made of what stands for their parts now, and compute in evaluation
        as in training."""
        modules = [vars(module) for whole in self._wholes.values() for module in whole.modules]
        repacking = [attributes for attributes in modules if attributes.get(_REPACKS)]
        for whole in self._wholes.values():
            stand_in = rebuild(whole.real, {path: self._stand_in(number) for path, number in whole.numbers.items()})
            for table, key in whole.places:
                table[key] = stand_in
        for attributes in repacking:
            attributes[_REPACKS] = False
        try:
            yield
        finally:
            for attributes in repacking:
                attributes[_REPACKS] = True
            for whole in self._wholes.values():
                for table, key in whole.places:
                    table[key] = None

    def _stand_in(self, number: int) -> torch.Tensor:
        table, key = self.place(number)
        fake: torch.Tensor = table[key]
        return fake


@contextlib.contextmanager
def fake_state(
    model: nn.Module,
    mode: FakeTensorMode,
    compute_dtype: ComputeDtype,
    device: torch.device,
    strides: Strides,
    parts: TracedParts,
    *,
    lent_as: str | None = None,
) -> Iterator[Mapping[int, Place]]:
    """Fake tensors instead of the model's parameters and buffers; shared tensors stay shared.

    Gives the place of each real tensor's stand-in, by its identity. What consists of parts is in ``parts``.
    ``lent_as``: the name of a model that another step trains; its parameters get no gradient.
    """
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def make(real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return fake_tensor(mode, real.shape, strides.get(id(real), real.stride()), dtype or real.dtype, device)

    table: dict[str, Any]
    for path, module in model.named_modules(prefix=lent_as or ""):
        for table, cast in ((parameter_table(module), True), (buffer_table(module), False)):
            for name, real in table.items():
                if real is None:
                    continue
                saved.append((table, name, real))
                if cast and parts_of(real):
                    parts.add(path_name(path, name), real, module, (table, name), make)
                elif id(real) not in fakes:
                    fake = make(real, cast_of(real, compute_dtype) if cast else None)
                    trained = real.requires_grad and lent_as is None
                    fakes[id(real)] = mark_as_parameter(fake, requires_grad=trained) if cast else fake
    for table, name, real in saved:
        table[name] = fakes.get(id(real))
    try:
        yield {id(real): (table, name) for table, name, real in saved if id(real) in fakes} | parts.places()
    finally:
        for table, name, real in saved:
            table[name] = real
