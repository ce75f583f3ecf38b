"""The scale of a loss from step to step: what ``torch.amp.GradScaler`` keeps, where the host knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zerofx.errors import UsageError
from zerofx.precision import LossScale

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # GradScaler's


class LossScaler:
    """The scale of a step's loss, float32, and how many steps in a row it has held.

    The coming step's loss is multiplied by ``scale``.

    The host learns in every step whether a gradient was not finite, so that it has the scale without asking the device.
    The device has it too (``tensor``), in the dtypes that are asked for, and it is written there where it changes.
    """

    def __init__(self, policy: LossScale) -> None:
        self._policy = policy
        self.scale = _float32(policy.init_scale)
        self._num_good_steps = 0
        self._tensors: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The scale on ``device``, rounded to ``dtype``, shape ``[]``; the same tensor each time.

        A scale that is beyond the range of ``dtype`` is infinite there, as where ``GradScaler`` is given such a loss.
        """
        if dtype not in self._tensors:
            self._tensors[dtype] = torch.empty((), dtype=dtype, device=device)
            self._write()
        return self._tensors[dtype]

    def update(self, *, is_finite: bool) -> None:
        """After a step: what ``torch.amp.GradScaler.update`` does, in its arithmetic.

        A product is taken in double precision and rounded to float32, and the scale does not grow past its range.
        """
        if not is_finite:
            self._set(_float32(self.scale * self._policy.backoff_factor), 0)
        elif self._num_good_steps + 1 == self._policy.growth_interval:
            grown = _float32(self.scale * self._policy.growth_factor)
            self._set(grown if math.isfinite(grown) else self.scale, 0)
        else:
            self._num_good_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The state, by the names and in the types that ``torch.amp.GradScaler.state_dict`` has."""
        policy = self._policy
        values = (
            self.scale, policy.growth_factor, policy.backoff_factor, policy.growth_interval, self._num_good_steps,
        )  # fmt: skip
        return dict(zip(_KEYS, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state_dict``, or ``GradScaler``'s, has given. How the scale changes stays as it is.

        Raises:
            UsageError: it is none; nothing has been changed.
        """
        check_scale(state)
        self._set(_float32(state["scale"]), state["_growth_tracker"])

    def _set(self, scale: float, num_good_steps: int) -> None:
        is_another, self.scale, self._num_good_steps = scale != self.scale, scale, num_good_steps
        if is_another:
            self._write()

    def _write(self) -> None:
        for tensor in self._tensors.values():
            tensor.copy_(torch.tensor(self.scale, dtype=torch.float32, device="cpu"))


def check_scale(state: object) -> None:
    """Check that ``state`` is that of a loss scale.

    Raises:
        UsageError: it is not.
    """
    given = state if isinstance(state, Mapping) else {}
    scale, tracker = given.get("scale"), given.get("_growth_tracker")
    is_scale = isinstance(scale, int | float) and 0 < scale <= torch.finfo(torch.float32).max
    if not is_scale or type(tracker) is not int or tracker < 0:
        raise UsageError(
            f"expected the state of a loss scale, with a 'scale' above 0 and a whole '_growth_tracker', found "
            f"{state!r:.200}: give what state_dict() has given"
        )


def _float32(number: float) -> float:
    """``number`` rounded to float32."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()
