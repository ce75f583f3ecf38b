"""Trace one step of an optimizer: run its own ``step`` on a shadow, with everything it does recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import does_not_step
from zerofx.optimizers.recorder import OpRecord, Ref, UpdateRecorder
from zerofx.optimizers.scalars import BranchGuard, Expr, GuardTape, Operand, StateScalar, TrackedScalar, lost_scalar
from zerofx.optimizers.shadow import (
    IMPLEMENTATION_FLAGS,
    TracedGroup,
    make_shadow,
    map_numbers,
    run_step,
    sample,
    tensor_options,
)
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.operators import call_one_by_one, is_foreach

# One, two and four dimensions: an update that treats them alike does not look at shapes.
SHAPES: Final = ((7,), (2, 3), (2, 1, 3, 2))


@dataclass(frozen=True)
class FlatState:
    """A tensor state after the traced step: its value, and the record that made its memory (None for an input).

    ``is_scalar``: a 0-dim tensor that a fused kernel reads, the others are flat.
    """

    value: Ref
    made_by: int | None
    dtype: torch.dtype
    is_scalar: bool


@dataclass(frozen=True)
class ScalarState:
    """A scalar state after the traced step. ``dtype`` is None for a Python number; ``initial`` None if not constant."""

    value: Operand
    dtype: torch.dtype | None
    initial: float | None


@dataclass(frozen=True)
class StepInputs:
    """What the traced step starts from: dtypes of flat states; dtype (None: Python number) and value of scalars."""

    flat: Mapping[str, torch.dtype]
    scalars: Mapping[str, tuple[torch.dtype | None, float]]

    @property
    def names(self) -> frozenset[str]:
        """All states that have values before the step."""
        return frozenset(self.flat) | frozenset(self.scalars)


@dataclass(frozen=True)
class Trace:
    """Everything one step did: operators on flat tensors, branches taken, and the state it leaves.

    ``options_read``: keys of ``param_groups`` that were looked at. ``names``: what the optimizer calls its scalars.
    """

    records: tuple[OpRecord, ...]
    guards: tuple[BranchGuard, ...]
    flat: Mapping[str, FlatState]
    scalars: Mapping[str, ScalarState]
    options_read: frozenset[str]
    names: Mapping[Expr, str]


class FunctionMode(TorchFunctionMode):
    """Sees the optimizer's calls into torch with tracked scalars still in place: all but those that ``recorder`` makes.

    Writes that are no operator's come to ``called`` as the operator that writes the same.
    """

    def __init__(self, recorder: UpdateRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.paused:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and args and not isinstance(args[0], torch.Tensor):
            return self.recorder.make_scalar(func, args[0], kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            self.called(torch.Tensor.masked_fill_, args, {})
            return None
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            self.called(torch.Tensor.copy_, args, {})
            return None
        return self.called(func, args, kwargs)


class FunctionRecorder(FunctionMode):
    """Records the calls, and what the optimizer's code calls its scalars."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.recorder.paused:
            self.recorder.note_names()
        return super().__torch_function__(func, types, args, kwargs)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        if func in (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero):
            return recorder.truth(args[0])
        if func in (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist):
            raise lost_scalar(recorder.cell(args[0]).expr, func.__name__)
        return recorder.call(func, args, kwargs)


class DispatchRecorder(TorchDispatchMode):
    """Sees the ATen operators that the optimizer's calls become."""

    def __init__(self, recorder: UpdateRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_foreach(func) and not self.recorder.fused:
            with self:
                return call_one_by_one(func, args, kwargs or {})
        return self.recorder.dispatch(func, args, kwargs or {})


class StateOfParameter(dict[str, Any]):
    """``optimizer.state[p]`` while it is traced: the first constant stored under a name is its initial value."""

    def __init__(self, recorder: UpdateRecorder, items: Mapping[str, Any]) -> None:
        super().__init__()
        self._recorder = recorder
        self.update(items)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._recorder.adopt_state(name, value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]


class StateOfOptimizer(defaultdict[Any, StateOfParameter]):
    """``optimizer.state`` while it is traced."""

    def __init__(self, recorder: UpdateRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __missing__(self, key: Any) -> StateOfParameter:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, StateOfParameter(self._recorder, value))


def trace_step(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    inputs: StepInputs,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fused: bool,
) -> Trace:
    """Run one step of a shadow of ``optimizer`` on a parameter of ``shape`` and record it.

    Raises:
        OptimizerError: the step does what cannot be done on a flat shard, or cannot be run, or rounds scalars as
            tensors are rounded.
    """
    name = type(optimizer).__name__
    if not fused and (keys := tensor_options(group)):  # of which torch's fused kernels read the number
        raise OptimizerError(
            f"expected numbers among the hyperparameters of {name}, found tensors in {', '.join(keys)}: give numbers"
        )
    tape = GuardTape()
    recorder = UpdateRecorder(name, torch.Size(shape).numel(), tape, fused=fused)
    param = sample(shape, dtype, -1.0, 1.3).requires_grad_()
    grad = param.grad = sample(shape, dtype, 0.7, -0.9)
    recorder.bind(param, ref=Ref("param"))
    recorder.bind(grad, ref=Ref("grad"))
    hypers = map_numbers(group, lambda where, value: TrackedScalar(where, value, tape))
    shadow = make_shadow(optimizer, hypers, param, fused=fused)
    traced_group = TracedGroup(shadow.param_groups[0])
    shadow.param_groups = [traced_group]
    state = StateOfOptimizer(recorder)
    shadow.state = state
    recorder.known_states.update(inputs.names)
    if inputs.names:
        state[param] = _bind_inputs(recorder, inputs, shape)
    counters = _counters(shadow)
    try:
        with FunctionRecorder(recorder), DispatchRecorder(recorder):
            run_step(shadow)
    except OptimizerError:
        raise
    except Exception as error:
        raise does_not_step(name, inputs.names, error) from error
    options_read = frozenset(traced_group.read)
    _check_side_effects(recorder, shadow, hypers, param, counters)
    flat, scalars = _states_after(recorder, state.get(param, {}))
    return Trace(tuple(recorder.records), tuple(tape.guards), flat, scalars, options_read, recorder.names)


def _bind_inputs(recorder: UpdateRecorder, inputs: StepInputs, shape: tuple[int, ...]) -> dict[str, Any]:
    """State that holds values: flat tensors, 0-dim tensors (flat-like in fused updates), tracked Python numbers."""
    state: dict[str, Any] = {}
    for name, dtype in inputs.flat.items():
        state[name] = sample(shape, dtype, 0.1, 0.9)
        recorder.bind(state[name], ref=Ref(name))
    for name, (scalar_dtype, value) in inputs.scalars.items():
        expr = StateScalar(name, is_tensor=scalar_dtype is not None)
        if scalar_dtype is None:
            state[name] = TrackedScalar(expr, value, recorder.tape)
            continue
        state[name] = torch.tensor(value, dtype=scalar_dtype, device="cpu")
        if recorder.fused:
            recorder.bind(state[name], ref=Ref(name))
        else:
            recorder.bind(state[name], expr=expr)
    return state


def _states_after(
    recorder: UpdateRecorder, state: Mapping[str, Any]
) -> tuple[dict[str, FlatState], dict[str, ScalarState]]:
    flat: dict[str, FlatState] = {}
    scalars: dict[str, ScalarState] = {}
    for name, value in state.items():
        dtype, initial = recorder.initial_scalars.get(name, (None, None))
        if isinstance(value, TrackedScalar):
            scalars[name] = ScalarState(value.expr, None, initial)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            scalars[name] = ScalarState(value, None, initial)
        elif isinstance(value, torch.Tensor):
            cell = recorder.cell(value)
            if cell.ref is not None:
                flat[name] = FlatState(cell.ref, cell.made_by, value.dtype, value.dim() == 0)
            elif cell.expr is not None:
                scalars[name] = ScalarState(cell.expr, dtype or value.dtype, initial)
        else:
            raise recorder.refuse(
                f'keeps a {type(value).__name__} in state["{name}"], where a tensor or a number was expected'
            )
    return flat, scalars


def _counters(optimizer: torch.optim.Optimizer) -> dict[str, int | float]:
    """The numbers among the optimizer's own attributes."""
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _check_side_effects(
    recorder: UpdateRecorder,
    shadow: torch.optim.Optimizer,
    hypers: Mapping[str, Any],
    param: torch.Tensor,
    counters: Mapping[str, int | float],
) -> None:
    """Refuse steps that keep what they need next time outside ``state[p]``: it would be out of the program's reach."""
    group = shadow.param_groups[0]
    for key, value in group.items():
        if key not in ("params", *IMPLEMENTATION_FLAGS) and (key not in hypers or value is not hypers[key]):
            raise recorder.refuse(f'changes param_groups["{key}"] in its step, where state[p] was expected to change')
    for key, number in _counters(shadow).items():
        if isinstance(number, TrackedScalar) or counters.get(key) != number:
            raise recorder.refuse(f"keeps a number in its attribute {key!r}, where state[p] was expected")
    for owner, value in shadow.state.items():
        if owner is not param and value:
            raise recorder.refuse("keeps state for something other than a parameter")
