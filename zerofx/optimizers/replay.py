"""Run a recorded step again for its numbers alone: its Python runs, and calls into torch are held against the record.

Calls that work on flat tensors are not made: they have to be the recorded ones, on the same tensors, and give the
recorded results. Calls on the host, and questions such as a tensor's dtype, are made. So a step in which other numbers
come up costs what its Python does, and one that takes another course is noticed at the first call that differs.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerofx.optimizers.recorder import Recorder


@dataclass(frozen=True)
class _Number:
    """A number among the arguments of a call, or the one in a tensor on the host of this ``dtype``.

    ``places``: which of the step's numbers it is, with their types; it is a constant where it is none.
    """

    value: Any
    name: str
    dtype: torch.dtype | None
    places: list[tuple[int, type]] = field(default_factory=list)


@dataclass(frozen=True)
class _Arguments:
    """Recorded arguments by position: flat tensors, which have to be the same ones, numbers, lists of flat tensors,
    other lists, and whatever else there is."""

    count: int
    flats: tuple[tuple[int, torch.Tensor], ...]
    numbers: tuple[tuple[int, _Number], ...]
    flat_lists: tuple[tuple[int, type, tuple[torch.Tensor, ...]], ...]
    lists: tuple[tuple[int, type, _Arguments], ...]
    others: tuple[tuple[int, Any], ...]

    def take(self, values: Sequence[Any], heard: list[Any]) -> bool:
        """Put the numbers among ``values`` where they belong; False for values that are not as they were."""
        if len(values) != self.count:
            return False
        for index, tensor in self.flats:
            if values[index] is not tensor:
                return False
        value: Any
        for index, number in self.numbers:
            value = values[index]
            if number.dtype is not None:
                if not isinstance(value, torch.Tensor) or value.dtype != number.dtype or value.numel() != 1:
                    return False
                value = value.item()
            elif type(value) is GroupNumbers:
                if value.kind is not type(number.value) or not number.places:
                    return False
                for place, kind in number.places:
                    heard[place] = GroupNumbers([kind(each) for each in value.values])
                continue
            elif type(value) is not type(number.value):
                return False
            for place, kind in number.places:
                heard[place] = kind(value)
            if not number.places and value != number.value:
                return False
        for index, kind, tensors in self.flat_lists:
            value, alike = values[index], type(values[index]) is kind
            if not alike or len(value) != len(tensors) or not all(map(operator.is_, value, tensors)):
                return False
        for index, kind, several in self.lists:
            if type(values[index]) is not kind or not several.take(values[index], heard):
                return False
        for index, other in self.others:
            if type(values[index]) is not type(other) or values[index] != other:
                return False
        return True


@dataclass(frozen=True)
class ExpectedCall:
    """A call of the recorded step. ``arguments`` are None where it is made, else it gives ``result``."""

    func: Any
    result: Any = None
    arguments: _Arguments | None = None
    names: tuple[str, ...] = ()


class _DiffersError(BaseException):
    """The step takes another course; nothing that catches errors in an optimizer's code catches this."""


class GroupNumbers:
    """A number of each of several groups, with which a step computes once for all of them, as Python would for each.

    A step that decides by them, other than for all groups alike, or takes one for a single number, differs.
    """

    def __init__(self, values: list[Any]) -> None:
        self.values, self.kind = values, type(values[0])
        if any(type(value) is not self.kind for value in values):
            raise _DiffersError

    @property  # type: ignore[misc]  # for who asks whether it is a number
    def __class__(self) -> type:
        return self.kind

    def __getattr__(self, name: str) -> Any:
        raise _DiffersError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _DiffersError

    def _refuse(self, *_: Any) -> Any:
        raise _DiffersError

    __float__ = __int__ = __index__ = __complex__ = __hash__ = __repr__ = __str__ = __format__ = __reduce__ = _refuse
    __deepcopy__ = __copy__ = __trunc__ = __floor__ = __ceil__ = _refuse

    def __bool__(self) -> bool:
        return _common_answer(list(map(bool, self.values)))


def _common_answer(answers: list[Any]) -> bool:
    """The one answer of all groups."""
    if any(answer is not answers[0] for answer in answers) or type(answers[0]) is not bool:
        raise _DiffersError
    return answers[0]


def _compute_each(compute: Callable[..., Any], operands: tuple[Any, ...]) -> list[Any] | None:
    """The results of ``compute`` for each group; None if an operand is no number."""
    several = [operand.values for operand in operands if type(operand) is GroupNumbers]
    lists = [
        operand.values if type(operand) is GroupNumbers else [operand] * len(several[0])
        for operand in operands
        if type(operand) in (GroupNumbers, int, float, bool)
    ]
    return list(map(compute, *lists)) if len(lists) == len(operands) else None


def _arithmetic(compute: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def calculate(*operands: Any) -> Any:
        values = _compute_each(compute, operands[::-1] if is_reflected else operands)
        return NotImplemented if values is None else GroupNumbers(values)

    return calculate


def _comparison(compute: Callable[..., Any]) -> Callable[..., Any]:
    def compare(*operands: Any) -> Any:
        answers = _compute_each(compute, operands)
        return NotImplemented if answers is None else _common_answer(answers)

    return compare


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(GroupNumbers, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(GroupNumbers, f"__r{_name}__", _arithmetic(getattr(operator, _name), is_reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(GroupNumbers, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(GroupNumbers, f"__{_name}__", _comparison(getattr(operator, _name)))


def expected_call(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, first: tuple[int, int]
) -> ExpectedCall | None:
    """The call that ``recorder`` has just seen, on flat tensors; None where what it gives does not follow from those.

    ``first``: how many records and numbers there were before it.
    """
    num_records, num_numbers = first
    if len(recorder.records) == num_records and not any(map(recorder.is_flat, members(result))):
        return ExpectedCall(func)
    given: list[_Number] = []
    arguments = _arguments_of(recorder, [*args, *kwargs.values()], [*("" for _ in args), *kwargs], given)
    for index in range(num_numbers, len(recorder.numbers)):
        number, use = recorder.numbers[index], recorder.uses[index].rpartition(".")[2]
        fitting = [each for each in given if each.value == number]
        if len(fitting) > 1:
            fitting = [each for each in fitting if each.name == use]
        if len(fitting) != 1:
            return None
        fitting[0].places.append((index, type(number)))
    return ExpectedCall(func, result, arguments, tuple(kwargs))


def members(value: Any) -> Sequence[Any]:
    """The members of a list or tuple; anything else itself."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _arguments_of(recorder: Recorder, values: Sequence[Any], names: Sequence[str], given: list[_Number]) -> _Arguments:
    """``values`` as a later call is held against them; the numbers among them are added to ``given``."""
    flats: list[tuple[int, torch.Tensor]] = []
    own: list[tuple[int, _Number]] = []
    flat_lists: list[tuple[int, type, tuple[torch.Tensor, ...]]] = []
    lists: list[tuple[int, type, _Arguments]] = []
    others: list[tuple[int, Any]] = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        if recorder.is_flat(value):
            flats.append((index, value))
        elif isinstance(value, torch.Tensor):
            own.append((index, _Number(recorder.item(value), name, value.dtype)))
        elif isinstance(value, numbers.Real) and not isinstance(value, bool):
            own.append((index, _Number(value, name, None)))
        elif type(value) in (list, tuple) and all(map(recorder.is_flat, value)):
            flat_lists.append((index, type(value), tuple(value)))
        elif type(value) in (list, tuple):
            lists.append((index, type(value), _arguments_of(recorder, value, [name] * len(value), given)))
        else:
            others.append((index, value))
    given += [number for _, number in own]
    return _Arguments(len(values), tuple(flats), tuple(own), tuple(flat_lists), tuple(lists), tuple(others))


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of a recorded step that have to do with its flat ``tensors``, and how many numbers are among them."""

    calls: tuple[ExpectedCall, ...]
    num_numbers: int
    tensors: tuple[torch.Tensor, ...]


class Replay(TorchFunctionMode):
    """Recorded steps that are done again as one step of one optimizer, each on its own flat tensors."""

    def __init__(self, recorded: Sequence[RecordedCalls]) -> None:
        super().__init__()
        self._recorded = tuple(recorded)
        self._owners = {id(tensor): index for index, each in enumerate(recorded) for tensor in each.tensors}
        self._left: list[Iterator[ExpectedCall]] = []
        self._heard: list[list[Any]] = []

    def numbers_of(
        self, step: Callable[[torch.optim.Optimizer], None], shadow: torch.optim.Optimizer
    ) -> list[list[Any]] | None:
        """The numbers of ``step(shadow)`` by recorded step; None where it does not make the recorded calls."""
        self._left = [iter(each.calls) for each in self._recorded]
        self._heard = [[None] * each.num_numbers for each in self._recorded]
        try:
            with self:
                step(shadow)
        except (_DiffersError, Exception):  # noqa: BLE001  # the step's own errors are met again where it is recorded
            return None
        return self._heard if all(next(left, None) is None for left in self._left) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = self._owners.get(id(args[0])) if args else None
        if owner is None and (owner := self._owner((*args, *kwargs.values()) if kwargs else args)) is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        call = next(self._left[owner], None)
        if call is None or (func is not call.func and func != call.func):
            raise _DiffersError
        if call.arguments is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kwargs:
            args = (*args, *kwargs.values())
        if (tuple(kwargs) if kwargs else ()) != call.names or not call.arguments.take(args, self._heard[owner]):
            raise _DiffersError
        return list(call.result) if type(call.result) is list else call.result

    def _owner(self, values: Sequence[Any]) -> int | None:
        for value in values:
            owner = self._owners.get(id(value))
            if owner is None and type(value) in (list, tuple):
                owner = self._owner(value)
            if owner is not None:
                return owner
        return None
