"""Run an optimizer's own step on tensors of a few elements that stand for a bucket, and record what it does.

The step's Python runs as it is, on copies of the groups and of the optimizer's attributes, with plain numbers: whatever
it computes with ``math`` or numpy, counts in a group or decides by a counter comes out as the operators that it calls
and the numbers that it gives them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import does_not_step
from zerofx.optimizers.build import FlatState
from zerofx.optimizers.nested import NestedOptimizer
from zerofx.optimizers.outside import PLAIN, OptimizerRest, attributes, entries_after, plain_attributes
from zerofx.optimizers.recorder import OpRecord, Recorder, Ref
from zerofx.optimizers.replay import ExpectedCall, RecordedCalls, Replay, expected_call, members
from zerofx.optimizers.shadow import choose_implementation, run_step, sample
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.operators import call_one_by_one, is_foreach

# One, two and four dimensions: an update that treats them alike does not look at shapes.
SHAPES: Final = ((7,), (2, 3), (2, 1, 3, 2))
_READS_MEMORY: Final = frozenset(
    {"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"}
)


@dataclass(frozen=True)
class StandIn:
    """The start of the update of some buckets: their group, dtype, flat states and the values of other states.

    ``fused``: torch's one kernel is called, which reads the 0-dim states ``singles`` where the parameters are.
    ``has_gradient`` is False for what stands for a group of which nothing is trained. ``optimizer``: whose group it is,
    of several.
    """

    group: int
    dtype: torch.dtype
    flat: tuple[tuple[str, torch.dtype], ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()
    singles: tuple[tuple[str, torch.dtype], ...] = ()
    fused: bool = False
    has_gradient: bool = True
    optimizer: int = 0

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for stand-ins that differ in the values of scalar states alone."""
        kinds = tuple((name, type(value)) for name, value in self.scalars)
        return (
            self.group, self.dtype, self.flat, kinds, self.singles, self.fused, self.has_gradient, self.optimizer,
        )  # fmt: skip

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for stand-ins that are updated alike."""
        values = [
            (value.dtype, value.item()) if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
            for _, value in self.scalars
        ]
        return (*self.form, *values)


@dataclass(frozen=True)
class Skeleton:
    """A step but for the numbers in it: its operators, and which values its flat states have after it."""

    records: tuple[OpRecord, ...]
    flat: tuple[tuple[str, FlatState], ...]


@dataclass(frozen=True)
class StandInOutcome:
    """A step on a stand-in: with which numbers it did what it did, and the changes that it leaves."""

    numbers: tuple[int | float, ...]
    scalars: dict[str, Any]
    group: dict[str, Any]
    attributes: dict[str, Any]


class _Functions(TorchFunctionMode):
    """Sees the step's calls into torch, notes them, and refuses those that read whole tensors.

    Writes that are no operator's are made as the operator that writes the same.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._calls: list[ExpectedCall | None] = []  # on flat tensors
        self._tensors: dict[int, torch.Tensor] = {}
        self._num_records = 0  # that calls have made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recorder.paused:
            return func(*args, **kwargs)
        recorder = self.recorder
        first = len(recorder.records), len(recorder.numbers)
        is_about_flat = any(recorder.is_flat(v) for value in (*args, *kwargs.values()) for v in members(value))
        if first[0] != self._num_records:
            self._calls.append(None)  # an operator without a call
        result = self._call(func, args, kwargs)
        self._num_records = len(recorder.records)
        flats = [
            value for each in (*args, *kwargs.values(), result) for value in members(each) if recorder.is_flat(value)
        ]
        self._tensors.update({id(tensor): tensor for tensor in flats})
        if is_about_flat:
            self._calls.append(expected_call(recorder, func, args, kwargs, result, first))
        elif flats:
            self._calls.append(None)  # what it makes is made anew by each step
        return result

    def to_calls(self) -> RecordedCalls | None:
        """The step's calls, to be held against those of other steps; None where these do not say all that it does."""
        calls = [call for call in self._calls if call is not None]
        if len(calls) < len(self._calls) or self._num_records < len(self.recorder.records):
            return None
        return RecordedCalls(tuple(calls), len(self.recorder.numbers), tuple(self._tensors.values()))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if func in (torch.tensor, torch.as_tensor) and args and not isinstance(args[0], torch.Tensor):
            return self.recorder.make_scalar(func, args[0], kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            torch.Tensor.masked_fill_(*args)
            return None
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            torch.Tensor.copy_(*args)
            return None
        if name in _READS_MEMORY and self.recorder.cell(args[0]).ref is not None:
            raise self.recorder.refuse(f"calls {name}() on a whole tensor, whose values are not those of the shard")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Sees the ATen operators that the step's calls become."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_foreach(func) and not self.recorder.fused:
            with self:
                return call_one_by_one(func, args, kwargs or {})
        return self.recorder.dispatch(func, args, kwargs or {})


class StandInStep:
    """A step, recorded, of a shadow that has one parameter, of ``shape``, in a stand-in's group alone.

    Neither the optimizer that ``state`` was taken of nor ``state`` is changed. ``calls`` are None where the step cannot
    be done again by them (``repeat``).
    """

    def __init__(self, state: OptimizerRest, stand_in: StandIn, shape: tuple[int, ...] = SHAPES[0]) -> None:
        """Step once, and record it.

        Raises:
            OptimizerError: the step does what cannot be done on a flat shard, or cannot be run.
        """
        self.param = sample(shape, stand_in.dtype, -1.0, 1.3).requires_grad_()
        self._grad = sample(shape, stand_in.dtype, 0.7, -0.9) if stand_in.has_gradient else None
        self._before = {key: sample(shape, dtype, 0.1, 0.9) for key, dtype in stand_in.flat}
        self._before |= {key: torch.ones((), dtype=dtype, device="cpu") for key, dtype in stand_in.singles}
        alone = state.select_group(stand_in.group)
        shadow = _shadow(alone, [[self.param]], {0} if stand_in.fused else set())
        own = self.put_into(shadow, stand_in)
        recorder = Recorder(state.kind.__name__, torch.Size(shape).numel(), fused=stand_in.fused)
        recorder.bind_numbers([own, shadow.param_groups, plain_attributes(shadow)])
        recorder.bind(self.param, Ref("param"))
        if self._grad is not None:
            recorder.bind(self._grad, Ref("grad"))
        for key, value in self._before.items():
            recorder.bind(value, Ref(key))
        functions = _Functions(recorder)
        try:
            with functions, _Operators(recorder):
                run_step(shadow)
        except OptimizerError:
            raise
        except Exception as error:
            raise does_not_step(recorder.optimizer, own, error) from error
        for owner, entries in shadow.state.items():
            if owner is not self.param and entries:
                raise recorder.refuse("keeps state for something other than a parameter")
        after = shadow.state.get(self.param, {})
        flat, scalars = _states_after(recorder, after)
        self._after = {name: after[name] for name in flat}
        self._kinds = {name: type(value) for name, value in scalars.items()}
        self.calls = functions.to_calls()
        self.skeleton = Skeleton(tuple(recorder.records), tuple(flat.items()))
        self.operators = repr(self.skeleton)
        group = _group_after(shadow, alone, 0, fused=stand_in.fused)
        self.outcome = StandInOutcome(tuple(recorder.numbers), scalars, group, attributes(shadow))

    def put_into(self, shadow: torch.optim.Optimizer, stand_in: StandIn) -> dict[str, Any]:
        """Give ``shadow``, which has the parameter, gradient and states as ``stand_in`` has them; returns these."""
        before = self._before | copy_scalars(dict(stand_in.scalars))
        if before:
            shadow.state[self.param] = dict(before)
        self.param.grad = self._grad
        return before

    def scalars_after(self, shadow: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The states that are no flat tensors, after a step with the recorded calls; None where others are there."""
        entries: dict[str, Any] = shadow.state.pop(self.param, {})
        if len(entries) != len(self._after) + len(self._kinds):
            return None
        scalars: dict[str, Any] = {}
        for name, value in entries.items():
            if name in self._after:
                if value is not self._after[name]:
                    return None
            elif type(value) is self._kinds.get(name) and _is_scalar(value):
                scalars[name] = value.detach() if isinstance(value, torch.Tensor) else value
            else:
                return None
        return scalars


class _FirstValues(dict[str, Any]):
    """A parameter's states, with each one's first value that is no flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first and _is_scalar(value):
            self.first |= copy_scalars({name: value})
        super().__setitem__(name, value)


def first_scalars(state: OptimizerRest, stand_in: StandIn) -> dict[str, Any]:
    """The states that are no flat tensors as the first step makes them, before it counts on.

    Raises:
        OptimizerError: the step does what cannot be done on a flat shard, or cannot be run.
    """
    if issubclass(state.kind, NestedOptimizer):
        raise OptimizerError(
            f"expected a step of {state.kind.__name__} before its states are asked for, found none: call this after it"
        )
    step = StandInStep(state, stand_in)
    shadow = _shadow(state.select_group(stand_in.group), [[step.param]], {0} if stand_in.fused else set())
    step.put_into(shadow, stand_in)
    shadow.state[step.param] = states = _FirstValues()
    run_step(shadow)
    return states.first


class Repeated:
    """Recorded steps that are done again together, for stand-ins of the same forms: each call on a flat tensor has to
    be the recorded one, and is not made."""

    def __init__(self, steps: Sequence[StandInStep]) -> None:
        """``steps`` have all their calls."""
        self.steps = tuple(steps)
        self._replay = Replay([step.calls for step in steps if step.calls is not None])

    def outcomes(self, state: OptimizerRest, stand_ins: Sequence[StandIn]) -> list[StandInOutcome] | None:
        """One step from ``state``, of which each group has a stand-in; None where it does not do the same."""
        params: list[list[torch.Tensor]] = [[] for _ in state.groups]
        fused: dict[int, bool] = {}
        for step, stand_in in zip(self.steps, stand_ins, strict=True):
            params[stand_in.group].append(step.param)
            if fused.setdefault(stand_in.group, stand_in.fused) is not stand_in.fused:
                return None  # one group cannot be both
        shadow = _shadow(state, params, {group for group, is_fused in fused.items() if is_fused})
        for step, stand_in in zip(self.steps, stand_ins, strict=True):
            step.put_into(shadow, stand_in)
        numbers = self._replay.numbers_of(run_step, shadow)
        if numbers is None:
            return None
        groups = [_group_after(shadow, state, index, fused=is_fused) for index, is_fused in sorted(fused.items())]
        own = state.attributes_of(shadow)
        outcomes: list[StandInOutcome] = []
        for step, stand_in, heard in zip(self.steps, stand_ins, numbers, strict=True):
            scalars = step.scalars_after(shadow)
            if scalars is None:
                return None
            outcomes.append(StandInOutcome(tuple(heard), scalars, groups[stand_in.group], own))
        return outcomes if not any(shadow.state.values()) else None


def _shadow(state: OptimizerRest, params: list[list[torch.Tensor]], fused: set[int]) -> torch.optim.Optimizer:
    """A shadow over ``params`` in which the groups ``fused`` have torch's one kernel."""
    if fused:
        groups = tuple(_to_numbers(group) if i in fused else group for i, group in enumerate(state.groups))
        state = replace(state, groups=groups)
    shadow = state.shadow(params)
    for index, group in enumerate(shadow.param_groups):
        choose_implementation(state.kind, group, fused=index in fused)
    return shadow


def _group_after(shadow: torch.optim.Optimizer, state: OptimizerRest, index: int, *, fused: bool) -> dict[str, Any]:
    # Of torch's own steps, which leave groups as they are, those are fused.
    return state.groups[index] if fused else entries_after(shadow.param_groups[index], state.groups[index])


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """States that are no flat tensors, copied, on the host."""
    return {
        name: value
        if type(value) in PLAIN
        else value.to("cpu", copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in scalars.items()
    }


def _to_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's entries with numbers in the place of tensors of one element, which torch's kernels read as such."""

    def number(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(number, value))
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    return {key: number(value) for key, value in group.items()}


def _states_after(recorder: Recorder, state: Mapping[str, Any]) -> tuple[dict[str, FlatState], dict[str, Any]]:
    flat: dict[str, FlatState] = {}
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            if not _is_plain(value):
                raise recorder.refuse(
                    f'keeps a {type(value).__name__} in state["{name}"], where a tensor or numbers were expected'
                )
            scalars[name] = value
            continue
        cell = recorder.cell(value)
        is_single = recorder.fused and value.dim() == 0
        if cell.ref is None:
            scalars[name] = value.detach()
        elif value.numel() != recorder.numel and not is_single:
            raise recorder.refuse(f'keeps a tensor of shape {tuple(value.shape)} in state["{name}"]')
        else:
            flat[name] = FlatState(cell.ref, cell.made_by, value.dtype, is_single)
    return flat, scalars


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
