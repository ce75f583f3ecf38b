"""A bucket's traced update as data, for whatever places or runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from zerofx.errors import OptimizerError

HostFunction: TypeAlias = Callable[[Mapping[str, Any], dict[str, Any]], tuple[float, ...] | None]


@dataclass(frozen=True)
class StateSpec:
    """A flat state tensor, as long as the bucket's shard.

    ``name`` is its key in ``optimizer.state[p]``. ``initial`` fills it before the first step. A state that is
    ``written_first`` has no value of its own before: the first-step program writes it (SGD's momentum buffer).
    """

    name: str
    dtype: torch.dtype
    initial: float
    written_first: bool = False


@dataclass(frozen=True)
class ScalarStateSpec:
    """A scalar of the optimizer's state, one for the whole bucket, on the host.

    ``dtype`` is that of the 0-dim CPU tensor; None where the optimizer keeps a plain Python number. ``initial`` is its
    value before the first step, without meaning if the first-step program writes it (``written_first``).
    """

    name: str
    dtype: torch.dtype | None
    initial: float
    written_first: bool = False


@dataclass(frozen=True)
class UpdateProgram:
    """One variant of an optimizer's update on a flat shard.

    ``graph``: placeholders "param", "grad", the names in ``states``, the names in ``tensor_scalars``, then the scalars
    "s0", "s1" ...; call_function nodes on ATen overloads, in place on their buffers, in an order to keep; output ().
    All tensors are 1-D of one length, but for ``tensor_scalars``: 0-dim states that a fused kernel reads on the
    parameter's device.

    ``host_source`` defines the function that computes the scalars from ``optimizer.param_groups[i]`` and the bucket's
    scalar states. It returns None, and has changed nothing, when a branch or an option that this variant was traced
    for no longer holds: trace again. It needs ``torch`` in its namespace.

    Where ``host_source`` is empty, the scalars are what the optimizer's own step gives to the operators, heard at every
    step (``zerofx.optimizers.following.follower``); the states that are no flat tensors, and which states have values
    before and after, are then known when it has run, and not by the program.

    ``first_step_only``: right for the step that creates the state, after which another variant has to be traced.
    ``state_before`` and ``state_after`` name the states that have values before and after the update.
    """

    optimizer: str
    states: tuple[StateSpec, ...]
    scalar_states: tuple[ScalarStateSpec, ...]
    tensor_scalars: tuple[str, ...]
    graph: Graph
    num_scalars: int
    host_name: str
    host_source: str
    dtype: torch.dtype
    fused: bool
    first_step_only: bool
    state_before: frozenset[str]
    state_after: frozenset[str]

    def host(self) -> HostFunction:
        """Compile ``host_source``; keep the result, it is called at every step."""
        namespace: dict[str, Any] = {"torch": torch}
        exec(compile(self.host_source, f"<zerofx {self.host_name}>", "exec"), namespace)
        function: HostFunction = namespace[self.host_name]
        return function

    @property
    def key(self) -> Hashable:
        """Equal for programs that do the same: the text of graph and host function, and the layout of the state."""
        return (
            self.optimizer,
            self.dtype,
            self.fused,
            self.first_step_only,
            self.state_before,
            self.states,
            self.scalar_states,
            self.host_source,
            str(self.graph),
        )

    def new_states(self, length: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Flat states of ``length`` elements on ``device``, as they are before the first step."""
        return {s.name: torch.full((length,), s.initial, dtype=s.dtype, device=device) for s in self.states}

    def new_scalar_states(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Scalar states as they are before the first step; ``device`` is where ``tensor_scalars`` go."""
        return {
            s.name: s.initial
            if s.dtype is None
            else torch.tensor(s.initial, dtype=s.dtype, device=device if s.name in self.tensor_scalars else "cpu")
            for s in self.scalar_states
        }


def run_program(
    program: UpdateProgram,
    param: torch.Tensor,
    grad: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    scalar_states: dict[str, Any],
    group: Mapping[str, Any],
) -> None:
    """Run one update eagerly, in place: the reference that generated code is compared with.

    ``param``, ``grad`` and every tensor in ``states``: 1-D, of one length. ``scalar_states`` is updated in place.

    Raises:
        OptimizerError: a guard of the program does not hold for ``group`` and ``scalar_states``; nothing has changed.
    """
    scalars = program.host()(group, scalar_states)
    if scalars is None:
        raise OptimizerError(
            f"expected the options and branches that this {program.optimizer} update was traced with, found others in "
            "param_groups or in the state: trace the update again"
        )
    run_graph(program, param, grad, {**states, **scalar_states}, scalars)


def run_graph(
    program: UpdateProgram,
    param: torch.Tensor,
    grad: torch.Tensor,
    states: Mapping[str, Any],
    scalars: Sequence[float],
) -> None:
    """Run the operators of one update eagerly, in place, with these ``scalars``."""
    names = [*(spec.name for spec in program.states), *program.tensor_scalars]
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
