"""What the user asked of ``compile``, checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from zerofx.errors import UsageError
from zerofx.loss import LossFunction
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.plan import Plan
from zerofx.scheduler.policy import PolicyOptions

Backend = Literal["inductor", "eager"]
Precision = Literal["bf16"]


@dataclass(frozen=True)
class CompileOptions:
    """All options of one compiled step."""

    stage: int
    loss_fn: LossFunction | None
    precision: Precision | None
    backend: Backend
    machine: Machine | None
    plan: Plan | None
    policy: PolicyOptions
    max_shapes: int

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16" else None


def check_options(
    stage: int,
    loss_fn: LossFunction | None,
    precision: Precision | None,
    backend: Backend,
    machine: Machine | str | None,
    plan: Plan | None,
    prefetch: int,
    keep_gathered: Collection[str] | Literal["all"],
    max_shapes: int,
) -> CompileOptions:
    """The options as one object.

    Raises:
        UsageError: one of them cannot be; the message says what it can be.
    """
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UsageError(
            f"expected stage 0 (replicate), 1 (shard optimizer states), 2 (and gradients) or 3 (and parameters), found "
            f"{stage!r}"
        )
    if backend not in get_args(Backend):
        raise UsageError(f"expected backend 'inductor' or 'eager', found {backend!r}")
    if precision is not None and precision not in get_args(Precision):
        raise UsageError(f"expected precision None (as the model is) or 'bf16', found {precision!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise UsageError(f"expected prefetch to be a number of gathers to issue ahead, 0 or more, found {prefetch!r}")
    if isinstance(keep_gathered, str) and keep_gathered != "all":
        raise UsageError(f"expected keep_gathered to be 'all' or names of buckets, found {keep_gathered!r}")
    if max_shapes < 1:
        raise UsageError(f"expected max_shapes to be at least 1, found {max_shapes}")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"expected loss_fn(outputs, *batch) to be callable, found {type(loss_fn).__name__}")
    found = Machine.named(machine) if isinstance(machine, str) else machine
    return CompileOptions(
        stage, loss_fn, precision, backend, found, plan, PolicyOptions(prefetch, keep_gathered), max_shapes
    )
