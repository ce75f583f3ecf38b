"""Optimizers: attributes that torch keeps on them for itself."""

from __future__ import annotations

import torch

from zerofx.torch_private.versions import TORCH


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped: torch's schedulers warn if they step first, and check nothing else."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch sets it from outside too


def is_torchs_own(name: str) -> bool:
    """True if an optimizer's attribute is torch's, of its hooks, warnings, checks and profiling."""
    return name.startswith(("_optimizer_", "_opt_called", "_zero_grad_", "_warned_", "_need_device_"))


def has_hooks(name: str, value: object) -> bool:
    """True if an optimizer's attribute is a table of hooks."""
    return name.startswith("_optimizer_") and isinstance(value, dict)


def is_set_up(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer has the tables of hooks that torch's ``__init__`` makes, its own or another's."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def step_hooks(optimizer: torch.optim.Optimizer) -> list[object]:
    """The hooks registered on the optimizer to run before and after its ``step``."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def has_adagrad_for_gpus() -> bool:
    """True if torch's Adagrad has one kernel for its update on GPUs, as on CPUs: from 2.12 on."""
    return TORCH >= (2, 12)
