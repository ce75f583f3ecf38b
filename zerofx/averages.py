"""Averages of weights: the option ``average``, and how much of a step's parameters enters one."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

from zerofx.errors import UsageError
from zerofx.option_table import Kind, instances, is_count


@dataclass(frozen=True, kw_only=True)
class Average:
    """An average of parameters over steps: of those after the first ``after``, every ``every``-th.

    Raises:
        UsageError: a field cannot be; says what it can be.
    """

    after: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        for name, least in (("after", 0), ("every", 1)):
            if not is_count(getattr(self, name), least):
                raise UsageError(
                    f"expected {name} of {type(self).__name__} to be a whole number of steps, at least {least}, found "
                    f"{getattr(self, name)!r}"
                )


@dataclass(frozen=True)
class EMA(Average):
    """The exponential moving average of parameters: ``decay * average + (1 - decay) * parameter`` after each step.

    It begins as the parameters after the first step, and has the bits of ``torch.optim.swa_utils``.

    Raises:
        UsageError: a field cannot be; says what it can be.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool)
        if not is_number or not 0 <= self.decay <= 1:
            raise UsageError(f"expected decay of EMA to be a number from 0 to 1, found {self.decay!r}")


@dataclass(frozen=True)
class SWA(Average):
    """The mean of parameters over steps (stochastic weight averaging, 1803.05407).

    It has the bits of ``torch.optim.swa_utils.AveragedModel``.

    Raises:
        UsageError: a field cannot be; says what it can be.
    """


AVERAGE: Final = Kind("a zerofx.EMA or a zerofx.SWA", instances(EMA, SWA))
AVERAGE_STATE: Final = "weight_average"
STEPS_STATE: Final = "weight_average_steps"
"""The names of a parameter's average among its states, and of the number of steps since it began."""


def num_before(average: Average, step: int) -> int | None:
    """The number of steps in an average before step number ``step`` is; None if that does not enter it."""
    turn, rest = divmod(step - 1 - average.after, average.every)
    return turn if turn >= 0 and rest == 0 else None


def divisor(average: Average, step: int) -> float:
    """The number of steps in an average with step number ``step``; infinite if that does not enter it."""
    num = num_before(average, step)
    return math.inf if num is None else float(num + 1)


def weight(average: Average, step: int) -> float:
    """The share of the way to the parameters after step number ``step`` that an average goes: 0 where that does not
    enter it, 1 for the first that does."""
    num = divisor(average, step)
    if isinstance(average, EMA) and 1 < num < math.inf:
        return 1 - average.decay
    rounded: float = struct.unpack("f", struct.pack("f", 1 / num))[0]  # torch has it in a tensor of float32
    return rounded
