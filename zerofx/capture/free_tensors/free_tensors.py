"""Free tensors: used by ``forward`` or ``loss_fn``, but neither in the model nor in the batch, such as a teacher's.

They are found when a trace touches them, and named by how the function reaches them: through its closure, globals,
defaults, or attributes of the object it is bound to. A step reads each at that place whenever it runs, so that a
replaced one (a teacher that follows the model) counts. A tensor that cannot be reached so, such as one from a table of
another library, is bound once and for all.

Tensors that another open step trains are read where that step has them (``shared_model.py``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.capture.python_state.numbers import NumberTensor, Tape
from zerofx.errors import CaptureError, UsageError
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.precision import dtype_name
from zerofx.torch_private.modules import TABLES, buffer_table, child_table, parameter_table

# What is looked at in search of a tensor; data sets have millions of items, none of which a step reads.
_MOST_ITEMS, _MOST_OBJECTS = 10_000, 200_000
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Generator)


def _cell(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


# How one gets from an object to another, by kind.
_GET: Mapping[str, Callable[[Any, Any], Any]] = {
    "cell": _cell,
    "global": lambda function, name: function.__globals__[name],
    "attribute": getattr,
    "global of": lambda function, names: getattr(function.__globals__[names[0]], names[1]),
    "default": lambda function, index: function.__defaults__[index],
    "named default": lambda function, name: function.__kwdefaults__[name],
    "item": lambda container, key: _builtin(container).__getitem__(container, key),
}
_Way = tuple[tuple[str, Any], ...]
_Like = tuple[Any, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class _Place:
    """The path to a tensor, and its description when a step was captured."""

    way: _Way
    described: _Like


class FreeTensors:
    """The tensors that ``root`` is found to use besides the model's and the batch's, by name.

    Args:
        root: the function or module that is called in the step; None where there is none.
        name: what ``root`` is called.
    """

    def __init__(self, root: Callable[..., Any] | None, name: str) -> None:
        self._root, self._name = root, name
        self._places: dict[str, _Place] = {}
        self._lenders: tuple[SharedModel, ...] = ()
        self._lender_of: dict[int, str] = {}  # by the identity of a parameter or buffer
        self._lent: frozenset[str] = frozenset()
        self._index: dict[int, tuple[str, _Way, torch.Tensor]] | None = None
        self.tape = Tape(is_open=False)
        self._numbers: dict[str, NumberTensor] = {}  # those of all traces

    @property
    def candidates(self) -> tuple[SharedModel, ...]:
        """The models of other steps that may be used."""
        return self._lenders

    @property
    def lent(self) -> tuple[SharedModel, ...]:
        """The models of other steps of which something is known to be used."""
        return tuple(lender for lender in self._lenders if lender.name in self._lent)

    def offer(self, lenders: tuple[SharedModel, ...]) -> None:
        """Set the models of other open steps that may be used: their tensors are not in ``tensors``."""
        self._lenders = lenders
        self._lender_of = {
            id(tensor): lender.name
            for lender in lenders
            for _, tensor in (*named_parameters(lender.model), *named_buffers(lender.model))
        }
        for name, tensor in self.tensors().items():
            if self._learn_lender(tensor):
                del self._places[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors known so far, as they are now, without those that are no longer tensors."""
        reached = {name: self._follow(place.way) for name, place in self._places.items()}
        inputs = {name: entry.tensor for name, entry in self.tape.inputs.items() if name in self._numbers}
        return {name: value for name, value in reached.items() if isinstance(value, torch.Tensor)} | inputs

    def learn(self, touched: torch.Tensor) -> bool:
        """Find the path to a tensor that a trace has touched; True if it is found."""
        if self._learn_lender(touched):
            return True
        for name, entry in self.tape.inputs.items():
            if entry.tensor is touched:
                self._numbers[name] = entry
                return True
        if self._index is None:
            self._index = {}
            for name, way, value in self._walk():
                if isinstance(value, torch.Tensor):
                    self._index.setdefault(id(value), (name, way, value))
        if id(touched) not in self._index:
            return False
        name, way, _ = self._index[id(touched)]
        number, unique = 1, name
        while unique in self._places:
            number, unique = number + 1, f"{name} ({number + 1})"
        self._places[unique] = _Place(way, _description(touched))
        return True

    def is_lent(self, touched: torch.Tensor) -> bool:
        """True if another step may lend the tensor."""
        return id(touched) in self._lender_of

    def _learn_lender(self, touched: torch.Tensor) -> bool:
        if not self.is_lent(touched):
            return False
        self._lent |= {self._lender_of[id(touched)]}
        return True

    def retrace(self, trace: Callable[[], T]) -> T:
        """The result of ``trace``, repeated until it is made with all tensors that it touches.

        Raises:
            Exception: what the last trace raises.
        """
        while True:
            known = self._num_known()
            try:
                return trace()
            except Exception:
                if self._num_known() == known:
                    raise

    def _num_known(self) -> tuple[int, ...]:
        inputs = [name for name in self.tape.inputs if name in self._numbers]
        return len(self._places), len(self._lent), len(inputs)

    def forget_index(self) -> None:
        """Forget which objects are where, since something may have changed."""
        self._index = None

    def check(self) -> None:
        """Check that all tensors are like those that steps were captured with.

        Raises:
            UsageError: one is not.
        """
        for name, place in self._places.items():
            value = self._follow(place.way)
            if _description(value) != place.described:
                raise UsageError(
                    f"expected {name}, which {self._name} uses, to be like it was when the step was captured, "
                    f"{_text(place.described)}, found {_text(_description(value))}: change values, not shapes, dtypes "
                    f"or devices, or call step.close() and compile again"
                )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, as it is now, without a gradient."""
        if name in self._numbers:
            return self._numbers[name].fill()
        tensor: torch.Tensor = self._follow(self._places[name].way)
        return tensor.detach()

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules that can be reached and are in no other, nor in ``model``, by name."""
        own = set(model.modules())
        outermost: dict[str, nn.Module] = {}
        inside: set[nn.Module] = set()
        for name, reached in self.reachable():
            if isinstance(reached, nn.Module) and reached not in own and reached not in inside:
                inside |= set(reached.modules())
                outermost[name] = reached
        return outermost

    def reachable(self) -> Iterator[tuple[str, Any]]:
        """The reachable objects, the nearest first, each with its name."""
        for name, _, value in self._walk():
            yield name, value

    def _follow(self, way: _Way) -> Any:
        value: Any = self._root
        try:
            for kind, key in way:
                value = _GET[kind](value, key)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        return value

    def _walk(self) -> Iterator[tuple[str, _Way, Any]]:
        """The reachable objects, the nearest first."""
        pending: deque[tuple[str, _Way, Any]] = deque([(self._name, (), self._root)])
        seen: dict[int, Any] = {}  # with what it is the identity of, which may be gone otherwise
        while pending and len(seen) < _MOST_OBJECTS:
            name, way, reached = pending.popleft()
            if id(reached) in seen or isinstance(reached, _LEAVES):
                continue
            seen[id(reached)] = reached
            yield name, way, reached
            for kind, key, child, child_name in _children(name, reached):
                pending.append((child_name, (*way, (kind, key)), child))


def _children(name: str, owner: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """The objects one step away: the kind of step, its key, the object, and its name."""
    if isinstance(owner, torch.Tensor | ModuleType):
        return
    if isinstance(owner, FunctionType):
        yield from _function_children(owner)
    elif isinstance(owner, MethodType):
        yield "attribute", "__self__", owner.__self__, name
        yield "attribute", "__func__", owner.__func__, name
    elif isinstance(owner, functools.partial):
        yield "attribute", "func", owner.func, name
        yield "attribute", "args", owner.args, name
        yield "attribute", "keywords", owner.keywords, name
    elif isinstance(owner, nn.Module):
        for table in (parameter_table(owner), buffer_table(owner), child_table(owner), vars(owner)):
            for key, child in table.items():
                if key not in TABLES and child is not None:
                    yield "attribute", key, child, f"{name}.{key}"
        yield "attribute", "forward", owner.forward, name
    elif isinstance(owner, dict | list | tuple):
        builtin: Any = _builtin(owner)
        if builtin.__len__(owner) <= _MOST_ITEMS:
            entries: Iterable[tuple[Any, Any]] = (
                dict.items(owner) if isinstance(owner, dict) else enumerate(builtin.__iter__(owner))
            )
            for key, child in entries:
                yield "item", key, child, f"{name}[{key!r}]"
    elif not type(owner).__module__.startswith(("torch", "zerofx", "builtins")):
        for key, child in getattr(owner, "__dict__", {}).items():
            yield "attribute", key, child, f"{name}.{key}"
        called = getattr(owner, "__call__", None)  # noqa: B004 - what is called is looked into
        if isinstance(called, MethodType):
            yield "attribute", "__call__", called, name


def _builtin(container: Any) -> Any:
    """The built-in type whose methods read a container: those of a user's class may do something else."""
    return next(kind for kind in (dict, list, tuple) if isinstance(container, kind))


def _function_children(function: FunctionType) -> Iterator[tuple[str, Any, Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "cell", name, cell.cell_contents, name
        except ValueError:  # of a cell that is empty
            continue
    for index, default in enumerate(function.__defaults__ or ()):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        yield "default", index, default, names[index - len(function.__defaults__ or ())]
    for name, default in (function.__kwdefaults__ or {}).items():
        yield "named default", name, default, name
    if function.__module__ is not None and function.__module__.partition(".")[0] in ("torch", "zerofx"):
        return
    names_used = dict.fromkeys(_names_in(function.__code__))
    for name in names_used:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield "global", name, value, name
            continue
        for inner in names_used:
            if inner in vars(value) and not value.__name__.startswith("torch"):
                yield "global of", (name, inner), vars(value)[inner], f"{name}.{inner}"


def _names_in(code: CodeType) -> Iterator[str]:
    # Names that nobody can write are those of tools that rewrite code: of pytest, whose own lead to all tests of a run.
    yield from (name for name in code.co_names if name.isidentifier())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _description(value: Any) -> _Like:
    """The properties of a tensor that a captured step depends on; for anything else, its class."""
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__,)
    return value.dtype, tuple(value.shape), value.stride(), value.device


def _text(described: _Like) -> str:
    if len(described) == 1:
        return f"a {described[0]}"
    dtype, shape, stride, device = described
    return f"{dtype_name(dtype)}{list(shape)} with strides {list(stride)} on {device}"


def change_error(what: str) -> CaptureError:
    """The error for a forward that changes something that belongs to no step's model."""
    return CaptureError(
        f"expected a step that changes nothing outside of the model, found that it {what}: call eval() on its module "
        f"if it is a statistic of a layer in training mode, make its module a part of the model, or change it between "
        f"steps"
    )


class RetraceError(Exception):
    """Tensors were found that a trace was not made with: it has to be made again."""


@dataclass(frozen=True)
class StandInMaker:
    """Make stand-ins for real tensors: ``fake`` makes one for a free tensor; ``of_model`` has, by the identity of a
    parameter or buffer, the table and the key of its stand-in."""

    fake: Callable[[torch.Tensor], torch.Tensor]
    of_model: Mapping[int, tuple[dict[str, Any], str]]


class StandIns(TorchFunctionMode):
    """While open, functions of torch get fake tensors instead of free tensors.

    Args:
        known: by the identity of a real tensor, the table and the key of its stand-in, which tracing replaces.
        free_tensors: is told of further ones; ``has_learned`` says whether there were any, and so whether the trace has
            to be made again.
        fake: makes the stand-in of a tensor.
    """

    def __init__(
        self,
        known: Mapping[int, tuple[dict[str, Any], str]],
        free_tensors: FreeTensors,
        fake: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._known, self._outside, self._fake = known, free_tensors, fake
        self._made: dict[int, torch.Tensor] = {}
        self._others: dict[int, torch.Tensor] = {}  # which nothing leads to

    @property
    def has_learned(self) -> bool:
        return bool(self._made)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[self._replace(arg) for arg in args], **{k: self._replace(v) for k, v in (kwargs or {}).items()})

    def _replace(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._stand_in(argument)
        if type(argument) in (list, tuple):
            return type(argument)([self._replace(item) for item in argument])
        if type(argument) is dict:
            return {key: self._replace(item) for key, item in argument.items()}
        return argument

    def _stand_in(self, touched: torch.Tensor) -> torch.Tensor:
        key = id(touched)
        if key in self._known:
            table, name = self._known[key]
            stand_in: torch.Tensor = table[name]
            return stand_in
        if key in self._others:
            return touched
        if key not in self._made:
            if type(touched) not in (torch.Tensor, nn.Parameter) and not self._outside.is_lent(touched):
                return touched
            if not self._outside.learn(touched):
                self._others[key] = touched
                return touched
            self._made[key] = self._fake(touched)
        return self._made[key]
