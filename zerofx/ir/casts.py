"""Compute dtypes of a graph: of parameters and batch tensors, and the modules that keep float32."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from zerofx.choices import Fp32Module
from zerofx.errors import UsageError
from zerofx.units import first_few


@dataclass(frozen=True)
class Casts:
    """``dtype`` is what floating-point parameters and batch tensors are cast to, but for those of ``modules``.

    These compute in float32: inputs in ``dtype`` are cast to it, and results are cast back, but for scalars, such as a
    loss. None of ``modules`` is inside another; ``tensors`` are their parameters, by identity.
    """

    dtype: torch.dtype
    modules: tuple[nn.Module, ...] = ()
    tensors: frozenset[int] = frozenset()

    @staticmethod
    def from_model(model: nn.Module, dtype: torch.dtype | None, asked: Collection[Fp32Module]) -> ComputeDtype:
        """The casts of a model in which ``asked`` names the float32 modules.

        Raises:
            UsageError: a name or type is none of a module's, or a parameter of one cannot be kept.
        """
        if dtype is None or not asked:
            return dtype
        named = dict(model.named_modules())
        matched = {name for entry in asked for name in _matches(named, entry)}
        outermost = [
            name for name in named if name in matched and not any(_is_inside(name, other) for other in matched)
        ]
        modules = tuple(named[name] for name in outermost)
        inner = [(name, p) for name, p in model.named_parameters(remove_duplicate=False)]
        mine = {id(p) for name, p in inner if any(_is_inside(name, other) for other in outermost)}
        shared = [name for name, p in inner if id(p) in mine and not any(_is_inside(name, o) for o in outermost)]
        if shared:
            raise UsageError(
                f"expected parameters of keep_fp32 that no other module has, found {first_few(shared)}, "
                f"which computes in {dtype}: keep that module too, or neither"
            )
        low = [name for name, p in inner if id(p) in mine and p.dtype not in (torch.float32, torch.float64)]
        if low:
            raise UsageError(
                f"expected parameters of keep_fp32 that are stored in float32, found {first_few(low)}, which "
                f"is in {dict(inner)[low[0]].dtype}: call float() on its module before the optimizer is made"
            )
        return Casts(dtype, modules, frozenset(mine))

    def __str__(self) -> str:
        """Short text; all differences are in the dtypes of parameters and in the forward."""
        return f"{self.dtype}, {len(self.modules)} modules in float32"


ComputeDtype: TypeAlias = torch.dtype | Casts | None  # None: tensors as they are


def cast_of(tensor: torch.Tensor, compute_dtype: ComputeDtype) -> torch.dtype:
    """The dtype in which a graph reads ``tensor``: ``compute_dtype``, if one is given, for what is floating-point."""
    if compute_dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    if isinstance(compute_dtype, torch.dtype):
        return compute_dtype
    return tensor.dtype if id(tensor) in compute_dtype.tensors else compute_dtype.dtype


def _matches(named: dict[str, nn.Module], entry: Fp32Module) -> list[str]:
    matches = [
        name
        for name, module in named.items()
        if name and (fnmatch.fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry))
    ]
    if not matches:
        what = repr(entry) if isinstance(entry, str) else entry.__qualname__
        shown = [name for name in named if name]
        raise UsageError(
            f"expected keep_fp32 to name modules inside the model, found {what}, which is none: give names as in "
            f"model.named_modules() ({first_few(shown)}), patterns of them such as '*.norm', or types"
        )
    return matches


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")
