"""Optimizers: attributes that torch keeps on them for itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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


_OF_STATES = ("state_dict", "load_state_dict")


def tables_of_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tables of hooks of one that acts for ``optimizer``: its own for ``step``, empty ones for states."""
    hooks = {name: value for name, value in vars(optimizer).items() if has_hooks(name, value)}
    return hooks | {f"_optimizer_{name}_{when}_hooks": OrderedDict() for name in _OF_STATES for when in ("pre", "post")}


def has_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if hooks are registered to run before or after ``state_dict`` or ``load_state_dict``."""
    return any(getattr(optimizer, f"_optimizer_{name}_{when}_hooks") for name in _OF_STATES for when in ("pre", "post"))


def run_with_hooks(optimizer: torch.optim.Optimizer, name: str, call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)`` between the hooks registered for ``state_dict`` or ``load_state_dict``, the ``name``."""
    for hook in list(getattr(optimizer, f"_optimizer_{name}_pre_hooks").values()):
        hook(optimizer, *args)
    result = call(*args)
    for hook in list(getattr(optimizer, f"_optimizer_{name}_post_hooks").values()):
        hook(optimizer, *([result] if name == "state_dict" else []))
    return result


def has_adagrad_for_gpus() -> bool:
    """True if torch's Adagrad has one kernel for its update on GPUs, as on CPUs: from 2.12 on."""
    return TORCH >= (2, 12)
