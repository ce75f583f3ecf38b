"""The option ``precision``: what is computed, reduced and stored in which dtype, and how a loss is scaled."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from zerofx.choices import Fp8Recipe, Fp32Module, PrecisionOption, PrecisionWord, ReduceDtype, StateDtype
from zerofx.option_table import POSITIVE, Exclusion, Kind, check_values, option, words

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossScale:
    """The factor of a loss before backward, and how that changes: as ``torch.amp.GradScaler`` has it.

    After a step with a gradient that is not finite the scale is multiplied by ``backoff_factor``; after
    ``growth_interval`` steps in a row without one, by ``growth_factor``. Where both factors are 1 it stays.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    @staticmethod
    def fixed(scale: float) -> LossScale:
        """A scale that stays."""
        return LossScale(scale, growth_factor=1.0, backoff_factor=1.0)


def _is_scale(asked: object) -> bool:
    if not isinstance(asked, LossScale):
        return False
    numbers = (asked.init_scale, asked.growth_factor, asked.backoff_factor)
    return (
        all(map(_is_number, numbers))
        and asked.growth_factor >= 1
        and asked.backoff_factor <= 1
        and type(asked.growth_interval) is int
        and asked.growth_interval >= 1
    )


def _is_number(asked: object) -> bool:
    return POSITIVE.accepts(asked) and asked != math.inf


def _are_modules(asked: object) -> bool:
    """True for a collection of types of modules and of names."""
    from torch import nn  # the command line knows precisions without it

    return (
        isinstance(asked, Collection)
        and not isinstance(asked, str)
        and all(isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in asked)
    )


@dataclass(frozen=True)
class Precision:
    """The dtypes of computation, reduction and storage: ``precision=`` of ``zerofx.compile``.

    Raises:
        UsageError: a field cannot be; says what it can be.
    """

    compute: PrecisionWord | None = option(None, words(PrecisionWord))
    """None for the model's dtypes; ``"bf16"`` or ``"fp16"`` computes and communicates so, with float32 masters."""

    keep_fp32: Collection[Fp32Module] = option(
        (),
        Kind("types of modules and names, as in (nn.LayerNorm, '*.router')", _are_modules, tuple),
        Exclusion("compute", "it says what is not in bf16 or fp16", theirs=lambda word: word is None),
    )
    """modules that compute in float32 all the same, by type, name or pattern of names."""

    reduce_dtype: ReduceDtype | None = option(None, words(ReduceDtype))
    """``"fp32"`` or ``"bf16"`` for what gradients are summed over ranks and micro-batches in; None for what they are
    computed in."""

    state_dtype: StateDtype | None = option(None, words(StateDtype))
    """``"bf16"`` stores the optimizer's states so between steps, and computes with them in the dtype of the masters;
    None stores them as the optimizer has them."""

    fp8: Fp8Recipe | None = option(None, words(Fp8Recipe))
    """how those products of layers are taken in fp8 with which the step is faster so: with a scale for each tensor
    (``"tensorwise"``), for each row and column (``"rowwise"``), or likewise with weights' gradients in the compute
    dtype (``"rowwise_with_gw_hp"``), as torchao's recipes of these names; None for none."""

    loss_scale: LossScale | float | None = option(
        None,
        Kind("a finite number above 0, or a LossScale of such", lambda asked: _is_number(asked) or _is_scale(asked)),
    )
    """what the loss is multiplied by before backward: a ``LossScale``, as ``torch.amp.GradScaler`` has it, with a
    growth_factor of at least 1 and a backoff_factor of at most 1, or a number that stays; None for the defaults of the
    former with ``"fp16"``, and else for none."""

    def __post_init__(self) -> None:
        for name, value in check_values(Precision, vars(self)).items():
            object.__setattr__(self, name, value)

    @staticmethod
    def of(asked: Precision | PrecisionOption | None) -> Precision:
        """That which one word stands for."""
        if asked == "fp8":
            return Precision("bf16", fp8="rowwise")
        return asked if isinstance(asked, Precision) else Precision(asked)

    @property
    def scaling(self) -> LossScale | None:
        """The loss scale: as asked, or as ``GradScaler`` does by default where gradients are in float16."""
        if self.loss_scale is None:
            return LossScale() if self.compute == "fp16" else None
        return self.loss_scale if isinstance(self.loss_scale, LossScale) else LossScale.fixed(float(self.loss_scale))


_WORDS: Final = (*get_args(PrecisionWord), "fp8")
PRECISION: Final = Kind(
    "'bf16', 'fp16', 'fp8' or a zerofx.Precision",
    lambda asked: isinstance(asked, Precision) or asked in _WORDS,
    Precision.of,
    _WORDS,
)


def dtype_of(word: PrecisionWord | ReduceDtype | StateDtype) -> torch.dtype:
    """The compute dtype of a precision, and of other options with the same words."""
    import torch  # as above

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[word]


def dtype_name(dtype: torch.dtype | str) -> str:
    """``float32`` for ``torch.float32``, or for its text."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that ``dtype_name`` or ``str`` has given ``name`` for.

    Raises:
        ValueError: torch has none of this name.
    """
    import torch  # as above

    dtype = getattr(torch, dtype_name(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype, found {name!r}")
    return dtype
