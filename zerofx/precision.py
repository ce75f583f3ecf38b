"""What is computed in which dtype: the dtypes of precisions, and how a loss is scaled, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from zerofx.choices import Precision
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


def dtype_of(precision: Precision) -> torch.dtype:
    """What a precision computes in."""
    import torch  # the command line knows precisions without it

    return torch.bfloat16 if precision == "bf16" else torch.float16


def loss_scale_of(asked: object, precision: Precision | None) -> LossScale | None:
    """How the loss is scaled: as asked, or as ``GradScaler`` does by default where gradients are in float16.

    Raises:
        UsageError: what is asked for is no scale.
    """
    if asked is None:
        return LossScale() if precision == "fp16" else None
    scaling = LossScale.fixed(float(asked)) if _is_number(asked) else asked
    if not isinstance(scaling, LossScale) or not _is_scale(scaling):
        raise UsageError(
            f"expected loss_scale to be a number above 0 that stays, or a LossScale with an init_scale above 0, a "
            f"growth_factor of at least 1, a backoff_factor above 0 and up to 1 and a growth_interval of at least 1, "
            f"found {asked!r}"
        )
    return scaling


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
