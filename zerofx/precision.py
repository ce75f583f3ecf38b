"""What is computed in which dtype, what dtypes are called, and how a loss is scaled: the words of options, checked."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from zerofx.choices import Precision, ReduceDtype, StateDtype
from zerofx.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied by before backward, and how that changes: as ``torch.amp.GradScaler`` has it.

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


def dtype_of(word: Precision | ReduceDtype | StateDtype) -> torch.dtype:
    """What a precision computes in, and others that options call so."""
    import torch  # the command line knows precisions without it

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


def loss_scale_of(asked: object, precision: Precision | None, delayed_update: int | None) -> LossScale | None:
    """How the loss is scaled: as asked, or as ``GradScaler`` does by default where gradients are in float16.

    Raises:
        UsageError: what is asked for is no scale, or updates are delayed.
    """
    if asked is None:
        scaling: object = LossScale() if precision == "fp16" else None
    else:
        scaling = LossScale.fixed(float(asked)) if _is_number(asked) else asked
    if scaling is None:
        return None
    if not isinstance(scaling, LossScale) or not _is_scale(scaling):
        raise UsageError(
            f"expected loss_scale to be a number above 0 that stays, or a LossScale with an init_scale above 0, a "
            f"growth_factor of at least 1, a backoff_factor above 0 and up to 1 and a growth_interval of at least 1, "
            f"found {asked!r}"
        )
    if delayed_update is not None:
        raise UsageError(
            f"expected no loss scaling with delayed_update, whose updates are handed to the host before all gradients "
            f"are known to be finite, found precision={precision!r} and loss_scale={asked!r}: leave one of them out, "
            f"or give precision='bf16'"
        )
    return scaling


def check_kept(asked: object, precision: Precision | None) -> None:
    """Check what says which modules keep float32.

    Raises:
        UsageError: it is no collection of types and names, or there is nothing else than float32.
    """
    from torch import nn  # as above

    if (
        not isinstance(asked, Collection)
        or isinstance(asked, str)
        or not all(isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in asked)
    ):
        raise UsageError(
            f"expected keep_fp32 to be types of modules and names or patterns of names, such as (nn.LayerNorm, "
            f"'*.router'), found {asked!r}"
        )
    if asked and precision is None:
        raise UsageError(
            f"expected precision='bf16' or 'fp16' with keep_fp32, which says what is not in it, found precision=None "
            f"and {asked!r}: give a precision, or leave keep_fp32 out"
        )


def _is_number(asked: object) -> TypeGuard[int | float]:
    return isinstance(asked, int | float) and not isinstance(asked, bool)


def _is_scale(scaling: LossScale) -> bool:
    numbers = (scaling.init_scale, scaling.growth_factor, scaling.backoff_factor)
    return (
        all(_is_number(number) and math.isfinite(number) for number in numbers)
        and scaling.init_scale > 0
        and scaling.growth_factor >= 1
        and 0 < scaling.backoff_factor <= 1
        and type(scaling.growth_interval) is int
        and scaling.growth_interval >= 1
    )
