"""What a forward does, without its backward: every operator with its layer and arguments, and autograd's graph of it.

What a joint graph is made of, then, at a tenth of what tracing one costs. Two models with equal records have equal
joint graphs: a backward follows from autograd's graph and from the arguments of the operators that made it. Where it
depends on more, on Python that runs in backward, there is no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.batch import Batch
from zerofx.capture import running_layer, saves_by_hook, traceable
from zerofx.graph import Strides
from zerofx.loss import LossFunction
from zerofx.node_facts import Origin, Phase, Placeholder, Role, origin, set_origin, set_placeholder, set_value
from zerofx.stamp import NotRepeatedError


def record_forward(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    compute_dtype: torch.dtype | None,
    num_micro_batches: int,
    strides: Strides,
) -> fx.Graph:
    """Run the forward on fake tensors; arguments as for ``capture``.

    The graph's calls are operators, and its methods the nodes of autograd's graph, which stand behind all operators.
    Values are texts.

    Raises:
        NotRepeatedError: the model runs Python in backward, or has tensors of its own that are neither parameters nor
            buffers.
    """
    with traceable(model, batch, loss_fn, compute_dtype, num_micro_batches, strides) as (lossy, fakes, _, mode):
        recorder = _Recorder(model, fakes)
        with mode, recorder:
            loss = lossy(*fakes)
        return recorder.finished(loss)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, fakes: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._values: dict[int, fx.Node] = {}  # by the identity of a tensor
        self._functions: dict[Any, fx.Node] = {}  # autograd's nodes
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._made: list[tuple[fx.Node, list[torch.Tensor]]] = []
        for tensor, what in _given(model, fakes):
            if id(tensor) not in self._values:
                node = set_placeholder(self.graph.placeholder("given"), what)
                self._keep(set_value(node, _text(tensor)), [tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question, which tensors answer
            return func(*args, **(kwargs or {}))
        if saves_by_hook():
            raise NotRepeatedError("the model saves tensors for backward through hooks, as checkpointing does")
        given = pytree.tree_map(self._argument, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        node = self.graph.create_node("call_function", func, *given)
        set_origin(node, Origin(running_layer(), Phase.FORWARD))
        made = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        self._keep(node, made)
        self._made.append((node, made))
        return out

    def finished(self, loss: torch.Tensor) -> fx.Graph:
        """The record, with the loss as its output."""
        if any(one._backward_hooks for one in self._kept):
            raise NotRepeatedError("the model has hooks on tensors")
        # What autograd makes of an operator is there once the operator has returned.
        for node, made in self._made:
            set_value(node, ", ".join(map(_text, made)))
            for tensor in made:
                if tensor.grad_fn is not None:
                    self._function(tensor.grad_fn, node)
        self.graph.output(self._values[id(loss)])
        return self.graph

    def _keep(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        self._kept += tensors
        for index, tensor in enumerate(tensors):
            self._values[id(tensor)] = node if index == 0 else self._part(node, index)

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        part = self.graph.create_node("call_method", "part", (node, index))
        return set_origin(set_value(part, ""), Origin(running_layer(), Phase.FORWARD))

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


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"
