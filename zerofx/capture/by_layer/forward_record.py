"""A record of a forward alone: every operator with its layer and arguments, and autograd's graph.

It determines the joint graph at a tenth of the cost of tracing one. Two models with equal records have equal joint
graphs: a backward follows from autograd's graph and from the arguments of the operators that made it. The backward of
an autograd function in Python follows from its class and from what its context has: the tensors that were saved, and
its attributes, looked into as far as objects have some. Where an attribute cannot be told, there is no record. Between
processes this holds for torch's own functions only: any other name may be other code there.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from zerofx.capture.by_layer.replicate import NotRepeatedError
from zerofx.capture.layers import current_layer
from zerofx.capture.leaked_tensors import learn_caches
from zerofx.capture.objective.loss import LossModule
from zerofx.capture.python_state.executed import pause_recording
from zerofx.capture.replay import trace_logging
from zerofx.capture.traceable import Forward, model_tensors, traceable
from zerofx.capture.values.recurrent import RecurrentCalls, is_of_steps
from zerofx.ir.canonical import Number, canonical_line
from zerofx.ir.facts import Origin, Phase, Placeholder, set_origin, set_placeholder, set_value
from zerofx.ir.returned import NOTHING_ELSE, Returned
from zerofx.ir.serialise import LARGEST_LITERAL, NAMESPACES
from zerofx.torch_private.capture import fake_device, forward_class, saves_by_hook
from zerofx.torch_private.dispatch import TorchDispatchMode, without_modes
from zerofx.torch_private.operators import has_autograd_function
from zerofx.torch_private.tensors import has_hooks


@dataclass(frozen=True)
class ForwardRecord:
    """The operators that a forward runs, and autograd's graph of them.

    The calls among ``lines`` are operators, and the methods are nodes of autograd's graph, which come after all
    operators. Values are texts. ``asked`` lists the functions of torch that Python called, a line each (the tracer
    decides which of them are composites), then the buffers that get other tensors and the checks of values.
    ``returned`` are the forward's results besides its loss. ``foreign`` names an operator or a backward that is not
    torch's, if there is one. ``leaves_something``: whether the forward leaves tensors or other values on its modules.
    """

    lines: tuple[Line, ...]
    asked: str
    foreign: str | None
    returned: Returned = NOTHING_ELSE
    leaves_something: bool = False

    def graph(self) -> fx.Graph:
        """The lines as a graph that may be edited."""
        return graph_of(self.lines)

    def canonical(self) -> str:
        """The text of what ran: ``canonical`` of ``graph``, which is not built for it."""
        return "\n".join(
            canonical_line(line.op, line.target, (line.args, line.kwargs), line.what, line.value) for line in self.lines
        )

    def text(self) -> str:
        """A text that the joint graph follows from: equal for equal forwards."""
        return f"{self.canonical()}\n{self.asked}"

    def first_difference(self, other: ForwardRecord) -> str:
        """The first difference between the records of a call and of the next one, in words."""
        for own, line in zip(self.lines, other.lines, strict=False):
            if own != line:
                return f"{_call_text(own)} in one and {_call_text(line)} in the next"
        return "other functions of torch in one than in the next"


def record_forward(forward: Forward) -> ForwardRecord:
    """Run the forward on fake tensors.

    Raises:
        NotRepeatedError: the model runs Python in backward that may depend on more than can be told, or has tensors of
            its own that are neither parameters nor buffers.
    """
    given: list[weakref.ref[torch.Tensor]] = []

    def run(compiled: bool) -> ForwardRecord:
        with traceable(forward, compiled=compiled) as traced:
            lossy, fakes, _, mode = traced
            recorder, questions = _Recorder(lossy, fakes), _Asked()
            try:
                with mode, recorder, questions:
                    results = lossy(*fakes)
            finally:
                given.extend(recorder.tensors())
            lines = recorder.finish(results if isinstance(results, tuple) else (results,))
            notes = "\n".join((*questions.names, *lossy.rebound, *lossy.checked))
            leaves_something = bool(lossy.left or lossy.changed)
            return ForwardRecord(lines, notes, recorder.foreign, lossy.returned, leaves_something)

    record = trace_logging(forward, run)
    if any(tensor() is not None for tensor in given):  # a cache may have it
        learn_caches()
    return record


class _Asked(TorchFunctionMode):
    """Records the names of the functions and methods that Python calls on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._recurrent = RecurrentCalls()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(f"{getattr(func, '__module__', None)}.{getattr(func, '__qualname__', func)}")
        whole = self._recurrent.find_fused_call(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {})) if whole is None else whole()


class _Recorder(TorchDispatchMode):
    def __init__(self, lossy: LossModule, fakes: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._lines: list[Line] = []
        self._values: dict[int, Number] = {}  # by the identity of a tensor
        self._functions: dict[Any, Number] = {}  # autograd's nodes
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._made: list[tuple[Line, list[torch.Tensor]]] = []
        self.foreign: str | None = None
        for tensor, what in model_tensors(lossy, fakes):
            if id(tensor) not in self._values:
                self._keep(self._add(Line("placeholder", "given", (), {}, what, _text(tensor))), [tensor])

    @pause_recording
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # a question, which tensors answer
            return fake_device(args[0])
        if saves_by_hook():
            raise NotRepeatedError("the model saves tensors for backward through hooks, as checkpointing does")
        if func.namespace not in NAMESPACES:
            self.foreign = str(func)
        literal = func is torch.ops.aten.lift_fresh.default and id(args[0]) not in self._values
        literal = literal and args[0].numel() <= LARGEST_LITERAL
        texts, named = ((_literal_text(args[0]),), {}) if literal else map_aggregate((args, kwargs), self._argument)
        out = func(*args, **kwargs)
        line = Line("call_function", func, texts, named, _origin(current_layer()))
        results: list[torch.Tensor] = []
        map_aggregate(out, lambda leaf: results.append(leaf) if isinstance(leaf, torch.Tensor) else None)
        self._keep(self._add(line), results)
        self._made.append((line, results))
        return out

    def finish(self, results: tuple[torch.Tensor, ...]) -> tuple[Line, ...]:
        """Complete the record with the loss as its output, then the tensors that the forward puts into buffers."""
        if any(map(has_hooks, self._kept)):
            raise NotRepeatedError("the model has hooks on tensors")
        # What autograd makes of an operator is there once the operator has returned.
        for line, tensors in self._made:
            line.value = ", ".join(map(_text, tensors))
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    self._function(tensor.grad_fn, line.what)
        returned = tuple(self._values[id(result)] for result in results)
        self._add(Line("output", "output", (returned,), {}, Origin("", Phase.FORWARD), NO_VALUE))
        return tuple(self._lines)

    def tensors(self) -> Iterator[weakref.ref[torch.Tensor]]:
        """The tensors that operators have returned."""
        return (weakref.ref(tensor) for _, tensors in self._made for tensor in tensors)

    def _add(self, line: Line) -> Number:
        self._lines.append(line)
        return Number.from_place(len(self._lines) - 1)

    def _keep(self, number: Number, tensors: list[torch.Tensor]) -> None:
        self._kept += tensors
        for index, tensor in enumerate(tensors):
            self._values[id(tensor)] = number if index == 0 else self._part(number, index)

    def _part(self, number: Number, index: int) -> Number:
        return self._add(Line("call_method", "part", (number, index), {}, _origin(current_layer())))

    def _argument(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        number = self._values.get(id(argument))
        if number is None:
            raise NotRepeatedError("the model has tensors that are neither parameters nor buffers")
        return number

    def _function(self, function: Any, what: Placeholder | Origin) -> Number:
        if function in self._functions:
            return self._functions[function]
        is_ours = is_of_steps(function)
        if hasattr(function, "variable"):  # where a parameter's gradient arrives
            number = self._values[id(function.variable)]
        else:
            reads = tuple(
                (self._function(source, what), index) if source is not None else None
                for source, index in function.next_functions
            )
            name = function.name()
            if not is_ours and not _is_torchs(name):
                self.foreign = name
            context = self._context(function) if isinstance(function, BackwardCFunction) and not is_ours else ()
            number = self._add(Line("call_method", name, (*reads, *context), {}, what))
        self._functions[function] = number
        return number

    def _context(self, function: BackwardCFunction) -> tuple[Any, ...]:
        """The class, saved tensors, and attributes of an autograd function in Python, on which its backward depends.

        Raises:
            NotRepeatedError: one of them cannot be told.
        """
        forward = forward_class(function)
        assert forward is not None, "the backward of a function in Python has one"
        kind = f"{forward.__module__}.{forward.__qualname__}"
        backward = inspect.unwrap(getattr(forward, "backward", forward))
        if not inspect.isfunction(backward) or backward.__closure__ is not None:
            raise NotRepeatedError(f"the backward of {kind} depends on more than its context")
        saved = tuple(
            f"its result {tensor.output_nr}" if tensor is not None and tensor.grad_fn is function  # a tensor of its own
            else self._attribute(tensor, kind)
            for tensor in getattr(function, "saved_tensors", ())
        )  # fmt: skip
        return kind, hash(backward.__code__), saved, self._attribute(vars(function), kind)

    def _attribute(self, value: Any, path: str, depth: int = 0) -> Any:
        """``value`` as arguments of a line have it: tensors as numbers, objects as their classes and attributes."""
        match value:
            case torch.Tensor():
                return self._argument(value)
            case None | bool() | int() | float() | str() | torch.dtype() | torch.device() | torch.layout():
                return str(value) if isinstance(value, torch.device) else value
            case type():
                return f"{value.__module__}.{value.__qualname__}"
            case list() | tuple() if depth < _DEEPEST:
                return tuple(self._attribute(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
            case dict() if depth < _DEEPEST and all(isinstance(key, str) for key in value):
                return {key: self._attribute(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        is_open = hasattr(value, "__dict__") and not hasattr(value, "__slots__") and not callable(value)
        if depth < _DEEPEST and is_open:
            return type(value).__qualname__, self._attribute(vars(value), path, depth + 1)
        raise NotRepeatedError(f"{path}, of an autograd function in Python, is {type(value).__name__}")


_DEEPEST = 8  # levels of objects in one another that are looked into
_DEVICE = torch.ops.prim.device.default


@functools.lru_cache(maxsize=4096)
def _origin(layer: str) -> Origin:
    return Origin(layer, Phase.FORWARD)


@functools.cache
def _is_torchs(name: str) -> bool:
    """True if a node of autograd's graph is torch's own."""
    return has_autograd_function(name.removeprefix("torch::autograd::"))


def _literal_text(tensor: torch.Tensor) -> str:
    """The text of a tensor that was written as a literal in the forward, ``torch.tensor(0.5)``: its values."""
    with without_modes():
        return f"{_text(tensor)} {tensor.tolist()}"


def _call_text(line: Line) -> str:
    return f"{line.target}({', '.join((*map(str, line.args), *(f'{k}={v}' for k, v in line.kwargs.items())))})"


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"


NO_VALUE = type(None).__name__  # as ``canonical`` writes it


@dataclass(slots=True)
class Line:
    """A node: its arguments refer to other nodes as ``Number``; ``value`` is the text of its result."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    what: Placeholder | Origin
    value: str = ""


def graph_of(lines: Sequence[Line]) -> fx.Graph:
    """The lines as a graph, whose values are texts."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    for line in lines:
        args, kwargs = map_aggregate(
            (line.args, line.kwargs), lambda leaf: nodes[leaf.place] if isinstance(leaf, Number) else leaf
        )
        if isinstance(line.what, Placeholder):
            node = set_placeholder(set_value(graph.placeholder("given"), line.value), line.what)
        elif line.op == "output":
            node = graph.output(args[0])
        else:
            node = set_value(graph.create_node(line.op, line.target, args, kwargs), line.value)
            set_origin(node, line.what)
        nodes.append(node)
    return graph
