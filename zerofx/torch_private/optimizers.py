"""Optimizers: attributes that torch keeps on them for itself."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.torch_private.versions import TORCH


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped: torch's schedulers warn if they step first, and check nothing else."""
    for _, member in members_of(optimizer):
        member._opt_called = True  # type: ignore[attr-defined]  # torch sets it from outside too


def members_of(optimizer: torch.optim.Optimizer, path: str = "") -> list[tuple[str, torch.optim.Optimizer]]:
    """``optimizer`` and the optimizers in its attributes, in theirs, and so on, by their paths from it."""
    members = [(path, optimizer)]
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            members += members_of(value, f"{path}.{name}" if path else name)
    return members


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
    """The hooks registered on the optimizer, and on those that it holds, to run before and after their ``step``."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    tables = {id(table): table for _, each in members_of(optimizer) for table in (getattr(each, n, {}) for n in names)}
    return [hook for table in tables.values() for hook in table.values()]


def step_hook_tables(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tables of hooks of ``step``, for one that acts for ``optimizer``."""
    return {name: value for name, value in vars(optimizer).items() if has_hooks(name, value) and "_step_" in name}


def members_with_state_hooks(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The members of ``optimizer`` that have tables of hooks of ``state_dict`` and ``load_state_dict``."""
    return [member for _, member in members_of(optimizer) if hasattr(member, "_optimizer_state_dict_pre_hooks")]


def has_adagrad_for_gpus() -> bool:
    """True if torch's Adagrad has one kernel for its update on GPUs, as on CPUs: from 2.12 on."""
    return TORCH >= (2, 12)
