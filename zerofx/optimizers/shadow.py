"""Copies of the user's optimizer that are safe to step: the same class and options over tensors of a few elements.

Also one that averages parameters as it steps.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import torch

from zerofx.averages import AVERAGE_STATE, STEPS_STATE, SWA, Average, divisor, weight
from zerofx.torch_private.dispatch import default_device_type, run_as_written
from zerofx.torch_private.optimizers import has_hooks

# Options that choose an implementation, never the mathematics of the update.
IMPLEMENTATION_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")
_IGNORED_KEYS: Final = ("params", "param_names", *IMPLEMENTATION_FLAGS)


def structural_flags(group: Mapping[str, Any]) -> tuple[tuple[str, bool | str | None], ...]:
    """The options that choose another update rather than another number: booleans, strings and None."""
    return tuple(
        (key, value)
        for key, value in group.items()
        if key not in _IGNORED_KEYS and (value is None or isinstance(value, (bool, str)))
    )


def copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with its states, over the copies of its parameters.

    ``memo`` is that of the ``copy.deepcopy`` that copied the model. Hooks, gradient scalers and a ``step`` wrapped by a
    learning-rate scheduler are not copied.
    """
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if has_hooks(name, value):
            vars(copied)[name] = OrderedDict()
        elif name in ("state", "param_groups"):
            vars(copied)[name] = copy.deepcopy(value, memo)
        elif isinstance(value, torch.optim.Optimizer):
            vars(copied)[name] = copy_optimizer(value, memo)
        elif name not in ("step", "grad_scale", "found_inf", "state_dict", "load_state_dict"):
            vars(copied)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return copied


def choose_implementation(kind: type[torch.optim.Optimizer], group: dict[str, Any], *, fused: bool = False) -> None:
    """Have torch's own steps work tensor by tensor but for what is asked for; others choose what to compute.

    ``fused``: have them call their one kernel, which reads hyperparameters in tensors as numbers.
    """
    if _steps_by_torch(kind.__mro__):
        # Where foreach is asked for, torch rounds some updates otherwise.
        foreach = group.get("foreach") is True and not fused
        group.update(foreach=foreach, fused=fused, capturable=False, differentiable=False)


@functools.cache
def _steps_by_torch(classes: tuple[type, ...]) -> bool:
    bases = [base for base in classes if base is not torch.optim.Optimizer and "step" in vars(base)]
    return any(base.__module__.startswith("torch.optim.") for base in bases)


def step_of_class(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that runs hooks registered for every optimizer in the process."""
    step: Callable[..., Any] = kind.step
    inner: Callable[..., Any] | None = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None
    return step if inner is None else inner


def run_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the class's ``step``; what it compiles runs as it is written, so that modes see what it calls.

    Compiling beneath a mode fails, and for every later call of the same code too.
    """
    is_torchs = _steps_by_torch(type(optimizer).__mro__)
    with contextlib.nullcontext() if is_torchs else run_as_written():
        step_of_class(type(optimizer))(optimizer)


def on_host() -> contextlib.AbstractContextManager[object]:
    """While it is open, scalars that a step makes are on the host, whatever the default device."""
    return contextlib.nullcontext() if default_device_type() == "cpu" else torch.device("cpu")


def sample(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Evenly spaced values from ``low`` to ``high``: fixed data that leaves the random generators alone."""
    count = torch.Size(shape).numel()
    return torch.linspace(low, high, count, dtype=torch.float64, device="cpu").reshape(shape).to(dtype)


def make_averaging(optimizer: torch.optim.Optimizer, average: Average) -> torch.optim.Optimizer:
    """An optimizer with the attributes, groups and states of ``optimizer``, which is not changed, whose step also moves
    an average of each parameter, a state more: it is followed, placed, planned and saved as any other's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    divides = isinstance(average, SWA) and all(parameter.device.type == "cpu" for parameter in parameters)
    kind: Any = type(optimizer)
    averaging: torch.optim.Optimizer = object.__new__(_make_class(kind, average, divides))
    averaging.__dict__ = optimizer.__dict__
    return averaging


@functools.cache
def _make_class(kind: Any, average: Average, divides: bool) -> Any:
    own_step = step_of_class(kind)

    @functools.wraps(own_step)
    def step(self: torch.optim.Optimizer) -> None:
        own_step(self)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        states = self.state[parameter]
                        _follow(average, states, parameter, divides=divides)
                        self.state[parameter] = states  # a nest has joined those of its members

    names = {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


def _follow(average: Average, states: MutableMapping[str, Any], parameter: torch.Tensor, *, divides: bool) -> None:
    """Move a parameter's average as ``AveragedModel.update_parameters`` does: on CPUs its mean has other bits."""
    if AVERAGE_STATE not in states:
        states[AVERAGE_STATE] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states[STEPS_STATE] = 0
    states[STEPS_STATE] += 1
    mean, step = states[AVERAGE_STATE], int(states[STEPS_STATE])
    if divides:
        mean.add_(torch.sub(parameter, mean).div_(divisor(average, step)))
    else:
        mean.lerp_(parameter, weight(average, step))
