"""A shadow of the user's optimizer: the same class and options over one tiny parameter, safe to step."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from zerofx.optimizers.scalars import Hyper
from zerofx.torch_private.optimizers import has_hooks

# Options that choose an implementation, never the mathematics of the update.
IMPLEMENTATION_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")
IGNORED_KEYS: Final = ("params", "param_names", *IMPLEMENTATION_FLAGS)


def plain_number(value: Any) -> int | float | None:
    """The number in a hyperparameter (one-element tensors count), None for anything else (flags are not numbers)."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def map_numbers(group: Mapping[str, Any], make: Callable[[Hyper, int | float], Any]) -> dict[str, Any]:
    """The hyperparameters of ``group`` with every number replaced by ``make(where, value)``; flags are kept."""
    mapped: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if key in IMPLEMENTATION_FLAGS:
            mapped[key] = value
            continue
        number = plain_number(value)
        if number is not None:
            mapped[key] = make(Hyper(key), number)
        elif isinstance(value, (tuple, list)) and value and all(plain_number(x) is not None for x in value):
            numbers = [x for x in map(plain_number, value) if x is not None]
            mapped[key] = type(value)(make(Hyper(key, i, len(numbers)), x) for i, x in enumerate(numbers))
        else:
            mapped[key] = value
    return mapped


def structural_flags(group: Mapping[str, Any]) -> tuple[tuple[str, bool | str | None], ...]:
    """The options that choose another update rather than another number: booleans, strings and None."""
    return tuple(
        (key, value)
        for key, value in group.items()
        if key not in IGNORED_KEYS and (value is None or isinstance(value, (bool, str)))
    )


def tensor_options(group: Mapping[str, Any]) -> list[str]:
    """The hyperparameters that are tensors, or numpy's numbers, or have some: what is computed of those rounds as their
    dtype does. A ``float`` of numpy's is Python's."""
    entries = {key: value if isinstance(value, (tuple, list)) else (value,) for key, value in group.items()}
    return [
        key
        for key, values in entries.items()
        if key not in IGNORED_KEYS and any(hasattr(value, "dtype") and not isinstance(value, float) for value in values)
    ]


class TracedGroup(dict[str, Any]):
    """A parameter group that notes which of its entries are read."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        """All entries, which count as read."""
        self.read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        """All values, which count as read."""
        self.read.update(super().keys())
        return super().values()


def make_shadow(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor, *, fused: bool
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` over ``param`` alone, with the hyperparameters ``group`` and no state.

    Hooks, gradient scalers and a ``step`` wrapped by a learning-rate scheduler are not copied. Containers among the
    optimizer's attributes are copied one level deep, so that stepping the shadow does not change the original.
    """
    shadow = _without_hooks(optimizer)
    flags = _implementation_flags(optimizer, group, fused=fused)
    shadow.defaults = {**optimizer.defaults, **flags}
    vars(shadow)["state"] = defaultdict(dict)
    vars(shadow)["param_groups"] = [{**group, **flags, "params": [param]}]
    return shadow


def copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with its states, over the copies of its parameters.

    ``memo`` is that of the ``copy.deepcopy`` that copied the model. What is not copied is as for ``make_shadow``.
    """
    copied = _without_hooks(optimizer)
    copied.defaults = copy.copy(optimizer.defaults)
    copied.state = copy.deepcopy(optimizer.state, memo)
    copied.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    return copied


def _without_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    bare = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if has_hooks(name, value):
            vars(bare)[name] = OrderedDict()
        elif name not in ("step", "grad_scale", "found_inf"):
            vars(bare)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return bare


def keep_to_single_tensors(shadow: torch.optim.Optimizer) -> None:
    """Have torch's own steps work tensor by tensor but for what is asked for; others choose what to compute."""
    for group in shadow.param_groups:
        group.update(_implementation_flags(shadow, group, fused=False))


def _implementation_flags(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    bases = [base for base in type(optimizer).__mro__ if base is not torch.optim.Optimizer and "step" in vars(base)]
    if any(base.__module__.startswith("torch.optim.") for base in bases):
        # Where foreach is asked for, torch rounds some updates otherwise.
        foreach = group.get("foreach") is True and not fused
        return {flag: fused and flag == "fused" for flag in IMPLEMENTATION_FLAGS} | {"foreach": foreach}
    return {flag: group[flag] for flag in IMPLEMENTATION_FLAGS if flag in group}


def step_function(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that runs hooks registered for every optimizer in the process."""
    step: Callable[..., Any] = type(optimizer).step
    inner: Callable[..., Any] | None = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None
    return step if inner is None else inner


def run_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the class's ``step``; scalars that it makes are on the host, whatever the default device."""
    with torch.device("cpu"):
        step_function(optimizer)(optimizer)


def sample(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Evenly spaced values from ``low`` to ``high``: fixed data that leaves the random generators alone."""
    count = torch.Size(shape).numel()
    return torch.linspace(low, high, count, dtype=torch.float64, device="cpu").reshape(shape).to(dtype)
