"""The distinct parameters of a model, as a step graph has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.ir.casts import ComputeDtype, cast_of
from zerofx.ir.tensor_parts import named_parameters
from zerofx.scheduler.plan.placements import Sharded

Strides = Mapping[int, tuple[int, ...]]  # of parameters, by the identity of their tensors


@dataclass(frozen=True)
class ParameterInfo:
    """A distinct parameter tensor.

    ``name`` is its first dotted name, ``aliases`` all of them (more than one when weights are tied). ``dtype`` is the
    dtype it is stored in, ``compute_dtype`` the one that the graph reads. A slice of a parameter is one too: ``whole``
    is then the parameter's first name, and ``first_row`` where the slice begins in its first dimension. A complex one
    is described as what ``torch.view_as_real`` makes of it. Of a parameter that lies in parts on ``num_parts`` ranks of
    the model axis, along ``part``, shape and stride are those of one part. ``lent``: it is of another step's model.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    requires_grad: bool
    whole: str | None = None
    first_row: int = 0
    is_complex: bool = False
    part: Sharded | None = None
    num_parts: int = 1
    lent: bool = False

    @property
    def source(self) -> str:
        """The name of the model's own parameter."""
        return self.whole or self.name

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


def parameter_infos(model: nn.Module, compute_dtype: ComputeDtype, strides: Strides) -> tuple[ParameterInfo, ...]:
    """The distinct parameters of a model in order; ``compute_dtype`` and ``strides`` as for ``capture``."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    own = {id(parameter) for parameter in model.parameters()}  # scales stay in their dtype
    return tuple(
        ParameterInfo(
            name=names[key][0],
            aliases=tuple(names[key]),
            shape=(*p.shape, *((2,) if p.is_complex() else ())),
            stride=_real_stride(strides.get(key, p.stride())) if p.is_complex() else strides.get(key, p.stride()),
            dtype=p.dtype.to_real(),
            compute_dtype=(cast_of(p, compute_dtype) if key in own else p.dtype).to_real(),
            requires_grad=p.requires_grad,
            is_complex=p.is_complex(),
        )
        for key, p in tensors.items()
    )


def _real_stride(stride: tuple[int, ...]) -> tuple[int, ...]:
    return *(2 * elements for elements in stride), 1
