"""What a forward does, without its backward: every operator with its layer and arguments, and autograd's graph of it.

What a joint graph is made of, then, at a tenth of what tracing one costs. Two models with equal records have equal
joint graphs: a backward follows from autograd's graph and from the arguments of the operators that made it. Where it
depends on more, on Python that runs in backward, there is no record. From one process to another that holds for what is
torch's own: what else is called by a name may be other code there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zerofx.batch import Batch
from zerofx.capture import saves_by_hook, traceable
from zerofx.graph import Strides
from zerofx.graph_json import LARGEST_LITERAL, TORCH_NAMESPACES
from zerofx.layer_annotations import running_layer
from zerofx.loss import LossFunction
from zerofx.node_facts import Origin, Phase, Placeholder, Role, origin, set_origin, set_placeholder, set_value
from zerofx.stamp import NotRepeatedError, canonical


@dataclass(frozen=True)
class ForwardRecord:
    """What a forward did.

    The calls in ``graph`` are operators, and its methods the nodes of autograd's graph, which stand behind all
    operators. Values are texts. ``asked`` are the functions of torch that Python called, a line each: which of them
    are composed of others is up to the one who traces; behind them, the buffers that get other tensors. ``foreign``
    names an operator or a backward that is not torch's, if there is one.
    """

    graph: fx.Graph
    asked: str
    foreign: str | None

    @staticmethod
    def empty() -> ForwardRecord:
        """In the place of a record that is not needed any more."""
        return ForwardRecord(fx.Graph(), "", None)

    def text(self) -> str:
        """All of it that a joint graph follows from: equal for equal forwards."""
        return f"{canonical(self.graph)}\n{self.asked}"


def record_forward(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    compute_dtype: torch.dtype | None,
    num_micro_batches: int,
    strides: Strides,
) -> ForwardRecord:
    """Run the forward on fake tensors; arguments as for ``capture``.

    Raises:
        NotRepeatedError: the model runs Python in backward, or has tensors of its own that are neither parameters nor
            buffers.
    """
    with traceable(model, batch, loss_fn, compute_dtype, num_micro_batches, strides) as (lossy, fakes, _, mode):
        recorder, asked = _Recorder(model, fakes), _Asked()
        with mode, recorder, asked:
            made = lossy(*fakes)
        graph = recorder.finished(made if isinstance(made, tuple) else (made,))
        return ForwardRecord(graph, "\n".join((*asked.names, *lossy.rebound)), recorder.foreign)


class _Asked(TorchFunctionMode):
    """Remembers the names of the functions and methods that Python calls on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(f"{getattr(func, '__module__', None)}.{getattr(func, '__qualname__', func)}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, fakes: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.graph = fx.Graph()
        self._values: dict[int, fx.Node] = {}  # by the identity of a tensor
        self._functions: dict[Any, fx.Node] = {}  # autograd's nodes
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._made: list[tuple[fx.Node, list[torch.Tensor]]] = []
        self.foreign: str | None = None
        for tensor, what in _given(model, fakes):
            if id(tensor) not in self._values:
                node = set_placeholder(self.graph.placeholder("given"), what)
                self._keep(set_value(node, _text(tensor)), [tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question, which tensors answer
            return func(*args, **(kwargs or {}))
        if saves_by_hook():
            raise NotRepeatedError("the model saves tensors for backward through hooks, as checkpointing does")
        if func.namespace not in TORCH_NAMESPACES:
            self.foreign = str(func)
        literal = func is torch.ops.aten.lift_fresh.default and self._is_literal(args[0])
        given = ((_literal_text(args[0]),), {}) if literal else pytree.tree_map(self._argument, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        node = self.graph.create_node("call_function", func, *given)
        set_origin(node, Origin(running_layer(), Phase.FORWARD))
        made = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        self._keep(node, made)
        self._made.append((node, made))
        return out

    def finished(self, results: tuple[torch.Tensor, ...]) -> fx.Graph:
        """The record, with the loss as its output, and behind it what the forward puts in the places of buffers."""
        if any(one._backward_hooks for one in self._kept):
            raise NotRepeatedError("the model has hooks on tensors")
        # What autograd makes of an operator is there once the operator has returned.
        for node, made in self._made:
            set_value(node, ", ".join(map(_text, made)))
            for tensor in made:
                if tensor.grad_fn is not None:
                    self._function(tensor.grad_fn, node)
        self.graph.output(tuple(self._values[id(one)] for one in results))
        return self.graph

    def _keep(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        self._kept += tensors
        for index, tensor in enumerate(tensors):
            self._values[id(tensor)] = node if index == 0 else self._part(node, index)

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        part = self.graph.create_node("call_method", "part", (node, index))
        return set_origin(set_value(part, ""), Origin(running_layer(), Phase.FORWARD))

    def _is_literal(self, given: torch.Tensor) -> bool:
        return id(given) not in self._values and given.numel() <= LARGEST_LITERAL

    def _argument(self, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        found = self._values.get(id(given))
        if found is None:
            raise NotRepeatedError("the model has tensors that are neither parameters nor buffers")
        return found

    def _function(self, function: Any, behind: fx.Node) -> fx.Node:
        if function in self._functions:
            return self._functions[function]
        if isinstance(function, BackwardCFunction):
            raise NotRepeatedError(f"{type(function).__name__} is an autograd function in Python")
        if hasattr(function, "variable"):  # where a parameter's gradient arrives
            found = self._values[id(function.variable)]
        else:
            reads = tuple(
                (self._function(source, behind), index) if source is not None else None
                for source, index in function.next_functions
            )
            if not hasattr(torch._C._functions, function.name().removeprefix("torch::autograd::")):
                self.foreign = function.name()
            found = self.graph.create_node("call_method", function.name(), reads)
            set_origin(set_value(found, ""), Origin(origin(behind).layer, Phase.FORWARD))
        self._functions[function] = found
        return found


def _given(model: nn.Module, fakes: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, Placeholder]]:
    for name, parameter in model.named_parameters():
        yield parameter, Placeholder(Role.PARAMETER, name)
    for name, buffer in model.named_buffers():
        yield buffer, Placeholder(Role.BUFFER, name)
    for index, fake in enumerate(fakes):
        yield fake, Placeholder(Role.INPUT, str(index))


def _literal_text(tensor: torch.Tensor) -> str:
    """A tensor that was written down in the forward, ``torch.tensor(0.5)``, by its values."""
    with _disable_current_modes():
        return f"{_text(tensor)} {tensor.tolist()}"


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"
