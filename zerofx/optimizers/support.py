"""Optimizers that can run on flat shards: refused by name, with a fused kernel, on complex numbers as on pairs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.nested import NestedOptimizer
from zerofx.optimizers.outside import OptimizerRest
from zerofx.optimizers.shadow import choose_implementation, on_host, run_step, sample, step_of_class
from zerofx.torch_private.optimizers import has_adagrad_for_gpus, members_of

_REFUSED: Final = {
    "LBFGS": "its step needs a closure and dot products over all parameters",
    "SparseAdam": "it updates the rows of sparse gradients, and gradients are reduced densely",
}
_FUSED_CLASSES: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_DEVICES: Final = ("cpu", "cuda", "mps", "xpu")
# Of complex numbers that are tried, and steps: the first makes the states, the second reads them, the third what the
# second left.
_LENGTH: Final = 22
_NUM_STEPS: Final = 3


def has_fused(optimizer: torch.optim.Optimizer, device_type: str, dtype: torch.dtype) -> bool:
    """True if torch has one kernel, right for ``dtype``, for the update of this very class on this type of device."""
    if type(optimizer) is torch.optim.SGD and device_type == "cpu" and dtype.itemsize < 4:
        # Low-precision updates are skipped or read uninitialised memory there (pytorch issue 191763, up to torch 2.13).
        return False
    if type(optimizer) is torch.optim.Adagrad:
        return device_type == "cpu" or (device_type == "cuda" and has_adagrad_for_gpus())
    return type(optimizer) in _FUSED_CLASSES and device_type in _FUSED_DEVICES


def refuse_by_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse optimizers that are known, or declare themselves, to need more than a flat shard.

    Raises:
        OptimizerError: it names the optimizer and what is in the way.
    """
    if isinstance(optimizer, NestedOptimizer):
        for _, member in members_of(optimizer.outer):
            _refuse_class(member, group)
        return
    for own in ("state", "param_groups"):
        if own not in vars(optimizer):
            raise OptimizerError(
                f"expected an optimizer with states and param groups of its own, found {type(optimizer).__name__}, "
                f"whose {own} is another optimizer's: give zerofx.compile that one"
            )
    _refuse_class(optimizer, group)


def _refuse_class(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _REFUSED:
            raise OptimizerError(
                f"expected an optimizer that steps once on dense gradients, found {name}: "
                f"{_REFUSED[base.__name__]}; use another (such as AdamW, SGD, Muon)"
            )
    parameters = list(inspect.signature(step_of_class(type(optimizer))).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in kinds]
    if needed:
        raise OptimizerError(
            f"expected an optimizer that steps without arguments, found {name}.step({', '.join(needed)}): "
            "the loss is not evaluated again within a step; use an optimizer that needs no closure"
        )
    if group.get("differentiable"):
        raise OptimizerError(f"expected differentiable=False, found True in {name}: the update is not differentiated")


def refuse_dtype(dtype: torch.dtype) -> None:
    """Refuse parameters that are no real numbers; buckets hold the parts of complex ones.

    Raises:
        OptimizerError: it says what to do about them.
    """
    if not dtype.is_floating_point:
        raise OptimizerError(
            f"expected parameters of a floating-point or complex dtype, found {dtype}: call requires_grad_(False) on "
            f"them, or make them buffers"
        )


def check_parts(alone: OptimizerRest, dtype: torch.dtype) -> None:
    """Step a few complex numbers and the same as pairs of real ones, as ``torch.optim`` takes them.

    ``alone`` is an optimizer of one group.

    SGD does not: it multiplies complex numbers, and rounds once more than for real ones.

    Raises:
        OptimizerError: they do not stay the same to the bit.
    """
    pairs = sample((_LENGTH, 2), dtype.to_real(), -1.1, 1.2)
    whole = torch.view_as_complex(pairs.clone())
    params = [pairs.requires_grad_(), whole.requires_grad_()]
    shadows = [alone.shadow([[param]]) for param in params]
    for number in range(_NUM_STEPS):
        gradient = sample((_LENGTH, 2), dtype.to_real(), 0.8 - 0.3 * number, -0.6)
        params[0].grad, params[1].grad = gradient.clone(), torch.view_as_complex(gradient.clone())
        for shadow in shadows:
            choose_implementation(alone.kind, shadow.param_groups[0])
            with on_host():
                run_step(shadow)
    if not torch.equal(params[0].detach(), torch.view_as_real(params[1].detach())):
        raise OptimizerError(
            f"expected an optimizer that updates the real and the imaginary parts of a complex parameter as it does "
            f"real ones, to the bit, as all of torch.optim but SGD do, found that {alone.kind.__name__} does not: "
            f"use such a one, or let the parameter be what torch.view_as_real makes of it, and read it through "
            f"torch.view_as_complex"
        )
