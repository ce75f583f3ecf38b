"""A bucket's update as data, for whatever places or runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx.ir.buckets import ALIGNMENT_BYTES

_aten = torch.ops.aten


@dataclass(frozen=True)
class StateSpec:
    """A state tensor: as long as the bucket's shard, or of one element.

    ``name`` is its key in ``optimizer.state[p]``. ``initial`` fills it before the first step. A state that is
    ``written_first`` has no value of its own before: the first step's program writes it (SGD's momentum buffer).
    """

    name: str
    dtype: torch.dtype
    initial: float
    written_first: bool = False


@dataclass(frozen=True)
class StateTensor:
    """A tensor among the states of a whole parameter, by its path in ``optimizer.state[p]`` (``GG.0``).

    ``dtype``: what it is stored in. ``step_dtype``: what a step has it in, where that is another. ``in_subclass``: it
    is one of those that a tensor subclass consists of.
    """

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    in_subclass: bool = False
    step_dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes among others, each at a boundary of 64 bytes."""
        return self._bytes_in(self.dtype)

    @property
    def cast_bytes(self) -> int:
        """Bytes that it takes besides while a step has it in another dtype."""
        return 0 if self.step_dtype is None else self._bytes_in(self.step_dtype)

    def _bytes_in(self, dtype: torch.dtype) -> int:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        used = elements * dtype.itemsize if all(self.shape) else 0
        return -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class WholeParameter:
    """The update of one whole parameter of ``shape`` by the optimizer's own step: the tensors among its states, the
    floating-point operations it takes, in which dtype it takes most of them, and the most bytes that it holds besides
    parameter, gradient and states."""

    shape: tuple[int, ...]
    states: tuple[StateTensor, ...]
    flops: int
    flops_in: torch.dtype
    scratch_bytes: int

    @property
    def state_bytes(self) -> int:
        return sum(state.num_bytes for state in self.states)

    @property
    def cast_bytes(self) -> int:
        """Bytes of states in the dtypes that a step has them in, where they are stored in others."""
        return sum(state.cast_bytes for state in self.states)

    def store_states_in(self, dtype: torch.dtype, of_parameter: torch.dtype) -> WholeParameter:
        """The same with the states that have the parameter's dtype stored in ``dtype``; tensor subclasses stay."""
        return replace(
            self,
            states=tuple(
                replace(state, dtype=dtype, step_dtype=of_parameter)
                if state.dtype == of_parameter and not state.in_subclass
                else state
                for state in self.states
            ),
        )


WHOLE_STATES = "whole_states"
"""The name of the buffer of bytes in which a rank has the states of the parameters that it owns of a bucket."""


@dataclass(frozen=True)
class UpdateProgram:
    """One form of an optimizer's update on a flat shard, or of whole parameters.

    ``graph``: placeholders "param", "grad", the names in ``states``, those in ``tensor_scalars``, then the scalars
    "s0", "s1" ...; call_function nodes on ATen overloads, in place on their buffers, in an order to keep; output ().
    All tensors are 1-D of one length, but for ``tensor_scalars``: 0-dim states that a fused kernel reads on the
    parameter's device.

    ``scalars`` says of each scalar which argument of which operator it is, as in ``add_.alpha``. The optimizer's own
    step gives their values, step by step, and those of states that are no flat tensors (``ShadowOptimizer``).

    ``whole``: of an update that needs whole parameters, what it takes for each shape. Its graph is empty: an owner runs
    the optimizer's own step (``zerofx/optimizers/whole``), and ``states`` is one buffer of bytes, as long as what
    an owner keeps. ``joint``: of an optimizer that combines parameters, its number: all buckets
    with the same are updated in one step.
    """

    optimizer: str
    states: tuple[StateSpec, ...]
    tensor_scalars: tuple[StateSpec, ...]
    graph: Graph
    scalars: tuple[str, ...]
    dtype: torch.dtype
    fused: bool
    whole: tuple[WholeParameter, ...] = ()
    joint: int | None = None

    def of_shape(self, shape: tuple[int, ...]) -> WholeParameter:
        """The update of a whole parameter of ``shape``."""
        return next(each for each in self.whole if each.shape == shape)

    @property
    def num_scalars(self) -> int:
        return len(self.scalars)

    @property
    def text(self) -> str:
        """Equal for programs that do the same, in every process: the text of the graph, and the states' layout."""
        parts = (self.optimizer, self.dtype, self.fused, self.states, self.tensor_scalars, self.graph)
        return "\n".join(map(str, (*parts, self.whole, self.joint) if self.whole else parts))

    def new_states(self, length: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Flat states of ``length`` elements on ``device``, as they are before the first step."""
        return {s.name: torch.full((length,), s.initial, dtype=s.dtype, device=device) for s in self.states}

    def new_tensor_scalars(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """``tensor_scalars`` on ``device``, as they are before the first step."""
        return {s.name: torch.full((), s.initial, dtype=s.dtype, device=device) for s in self.tensor_scalars}


def run_graph(
    program: UpdateProgram,
    param: torch.Tensor,
    grad: torch.Tensor,
    states: Mapping[str, Any],
    scalars: Sequence[float],
) -> None:
    """Run the operators of one update eagerly, in place, with these ``scalars``: the reference for generated code.

    ``param``, ``grad`` and every flat tensor in ``states``: 1-D, of one length.
    """
    names = [spec.name for spec in (*program.states, *program.tensor_scalars)]
    inputs: list[Any] = [param, grad, *(states[name] for name in names), *scalars]
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs.pop(0)
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)


def cast_states(program: UpdateProgram, dtype: torch.dtype) -> UpdateProgram:
    """``program`` with the states that have the parameter's dtype in ``dtype`` between updates; others stay.

        lerp_(exp_avg, grad, s0)                up = _to_copy(exp_avg, dtype=float32)
        addcdiv_(param, exp_avg, ...)           lerp_(up, grad, s0)
                                                addcdiv_(param, up, ...)
                                                copy_(exp_avg, up)

    A step computes with what it has itself just computed: values are rounded once, as they are stored. Owners of whole
    parameters do so around the optimizer's own step.
    """
    if program.whole:
        return replace(program, whole=tuple(each.store_states_in(dtype, program.dtype) for each in program.whole))
    low = {spec.name for spec in program.states if spec.dtype == program.dtype != dtype}
    if not low:
        return program
    graph = Graph()
    values: dict[Node, Node] = {}
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        values[node] = graph.node_copy(node)
    stored = {node: values[node] for node in inputs if node.target in low}
    for node, state in stored.items():
        values[node] = graph.call_function(_aten._to_copy.default, (state,), {"dtype": program.dtype})
    for node in program.graph.nodes:
        if node.op == "call_function":
            values[node] = graph.node_copy(node, values.__getitem__)
    for node, state in stored.items():
        graph.call_function(_aten.copy_.default, (state, values[node]))
    graph.output(())
    graph.lint()
    states = tuple(replace(spec, dtype=dtype) if spec.name in low else spec for spec in program.states)
    return replace(program, graph=graph, states=states)
