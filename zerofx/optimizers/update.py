"""Trace an optimizer's update, turn it into a program, and check the program against the optimizer itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import looks_at_shapes
from zerofx.optimizers.build import build_graph
from zerofx.optimizers.host import write_host_function
from zerofx.optimizers.program import ScalarStateSpec, StateSpec, UpdateProgram
from zerofx.optimizers.shadow import structural_flags
from zerofx.optimizers.support import has_fused, refuse_by_name, refuse_dtype
from zerofx.optimizers.trace import SHAPES, StepInputs, Trace, trace_step
from zerofx.optimizers.verify import agrees


@dataclass(frozen=True)
class _Request:
    """What is traced, the same for every attempt."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    dtype: torch.dtype
    fused: bool

    def trace(self, inputs: StepInputs) -> Trace:
        """One step from ``inputs``, the same for parameters of every shape."""
        traces = [
            trace_step(self.optimizer, self.group, inputs, shape=shape, dtype=self.dtype, fused=self.fused)
            for shape in SHAPES
        ]
        if any(trace != traces[0] for trace in traces):
            raise looks_at_shapes(type(self.optimizer).__name__)
        return traces[0]


@dataclass(frozen=True)
class _Layout:
    """The states an optimizer makes in its first step."""

    flat: Mapping[str, StateSpec]
    scalars: Mapping[str, ScalarStateSpec]

    @property
    def written_first(self) -> list[str]:
        """States that have no constant value to start from."""
        flat = [s.name for s in self.flat.values() if s.written_first]
        return flat + [s.name for s in self.scalars.values() if s.written_first]


def trace_update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    *,
    state_present: frozenset[str] | None = None,
    scalar_values: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
) -> UpdateProgram:
    """The update of one flat shard, for the options and branches that hold now.

    The optimizer is not stepped and not changed.

    Args:
        optimizer: any elementwise optimizer.
        group: the entry of ``optimizer.param_groups`` that the shard belongs to.
        state_present: names of all states, flat and scalar, that have values; None or empty before the first step.
        scalar_values: present values of the scalar states, which decide the branches.
        dtype: of the parameter shard and its gradient.
        fused: use torch's fused kernel, see ``has_fused``.

    Raises:
        OptimizerError: the optimizer is not elementwise, needs a closure, or hides what it depends on.
    """
    refuse_by_name(optimizer, group)
    refuse_dtype(dtype)
    if fused and not any(has_fused(optimizer, device, dtype) for device in ("cpu", "cuda")):
        raise OptimizerError(
            f"expected an optimizer with a fused kernel, found {type(optimizer).__name__}: fused=False"
        )
    request = _Request(optimizer, group, dtype, fused)
    first, layout = _first_step(request)
    if state_present:
        inputs = _inputs_now(request, layout, state_present, scalar_values or {})
        return _checked(
            request, _program(request, request.trace(inputs), layout, inputs, first_step_only=False), inputs
        )
    nothing = StepInputs({}, {})
    if not layout.written_first:
        inputs = StepInputs(
            {s.name: s.dtype for s in layout.flat.values()},
            {s.name: (s.dtype, s.initial) for s in layout.scalars.values()},
        )
        program = _program(request, request.trace(inputs), layout, inputs, first_step_only=False)
        if first is None:
            return _checked(request, program, inputs)
        if agrees(program, optimizer, group, nothing):
            return program
    assert first is not None
    return _checked(request, _program(request, first, layout, nothing, first_step_only=True), nothing)


def state_names(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, dtype: torch.dtype, fused: bool = False
) -> tuple[dict[str, torch.dtype], frozenset[str]]:
    """The states that the update makes: those that are flat, with dtypes, and the scalars. Arguments are those of
    ``trace_update``.

    Raises:
        OptimizerError: the update cannot be traced.
    """
    _, layout = _first_step(_Request(optimizer, group, dtype, fused))
    return {name: spec.dtype for name, spec in layout.flat.items()}, frozenset(layout.scalars)


def _first_step(request: _Request) -> tuple[Trace | None, _Layout]:
    """The step that makes the states, and their layout; no trace where the optimizer made them when it was built."""
    try:
        first = request.trace(StepInputs({}, {}))
    except OptimizerError:
        layout = _layout_of_existing_state(request)
        if layout is None:
            raise
        return None, layout
    built = build_graph(first)
    scalars = {
        name: ScalarStateSpec(name, s.dtype, 0.0 if s.initial is None else s.initial, written_first=s.initial is None)
        for name, s in first.scalars.items()
    }
    scalars |= {name: ScalarStateSpec(name, first.flat[name].dtype, 0.0) for name in built.tensor_scalars}
    return first, _Layout({s.name: s for s in built.states}, scalars)


def scalars_by_shape(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a state of the group's parameters is a scalar, for each of which a number or a shape tells.

    A tensor among the states of a 0-dim parameter has shape [] either way, and tells nothing.
    """
    is_scalar: dict[str, bool] = {}
    for param in group.get("params", ()):
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and param.dim():
                is_scalar[name] = value.dim() == 0
            elif value is not None and not isinstance(value, torch.Tensor):
                is_scalar[name] = True
    return is_scalar


def _layout_of_existing_state(request: _Request) -> _Layout | None:
    """The layout of states that the optimizer's constructor made.

    None if there are none, one has not one value for all elements, or all are of 0-dim parameters, which do not show
    what has their shape.
    """
    params = request.group.get("params", ())
    state, param = next(((s, p) for p in params if (s := request.optimizer.state.get(p))), ({}, None))
    is_scalar = scalars_by_shape(request.optimizer, request.group)
    flat: dict[str, StateSpec] = {}
    scalars: dict[str, ScalarStateSpec] = {}
    for name, value in state.items():
        if name not in is_scalar:
            return None
        if isinstance(value, torch.Tensor) and is_scalar[name] and value.dim() == 0:
            scalars[name] = ScalarStateSpec(name, value.dtype, value.item())
        elif isinstance(value, torch.Tensor) and param is not None and value.shape == param.shape:
            if not bool((value == value.flatten()[0]).all()):
                return None
            flat[name] = StateSpec(name, value.dtype, float(value.flatten()[0]))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            scalars[name] = ScalarStateSpec(name, None, value)
        else:
            return None
    return _Layout(flat, scalars) if state else None


def _inputs_now(request: _Request, layout: _Layout, present: frozenset[str], values: Mapping[str, float]) -> StepInputs:
    """The present states; those that the present options would not make are told apart by having a scalar value."""
    flat: dict[str, torch.dtype] = {}
    scalars: dict[str, tuple[torch.dtype | None, float]] = {}
    for name in sorted(present):
        if name in layout.scalars or name in values:
            spec = layout.scalars.get(name, ScalarStateSpec(name, torch.float32, 0.0))
            scalars[name] = (spec.dtype, values.get(name, spec.initial))
        else:
            flat[name] = layout.flat[name].dtype if name in layout.flat else request.dtype
    # The optimizer's own order of states keeps programs of different steps alike.
    order = [*layout.flat, *layout.scalars]
    rank = {name: order.index(name) if name in order else len(order) for name in present}
    return StepInputs(
        {name: flat[name] for name in sorted(flat, key=lambda n: (rank[n], n))},
        {name: scalars[name] for name in sorted(scalars, key=lambda n: (rank[n], n))},
    )


def _program(
    request: _Request, trace: Trace, layout: _Layout, inputs: StepInputs, *, first_step_only: bool
) -> UpdateProgram:
    optimizer = type(request.optimizer).__name__
    built = build_graph(trace, inputs.names, {s.name: s.initial for s in layout.flat.values() if not s.written_first})
    specs = []
    for name, state in trace.scalars.items():
        known = layout.scalars.get(name) or ScalarStateSpec(name, state.dtype, 0.0)
        specs.append(replace(known, dtype=state.dtype))
    specs += [layout.scalars.get(n) or ScalarStateSpec(n, trace.flat[n].dtype, 0.0) for n in built.tensor_scalars]
    name = re.sub(r"\W", "_", optimizer).lower() + "_scalars"
    flags = [flag for flag in structural_flags(request.group) if flag[0] in trace.options_read]
    description = f"Scalars of one {optimizer} update; None if this update is for other options or another branch."
    return UpdateProgram(
        optimizer=optimizer,
        states=built.states,
        scalar_states=tuple(specs),
        tensor_scalars=built.tensor_scalars,
        graph=built.graph,
        num_scalars=len(built.scalars),
        host_name=name,
        host_source=write_host_function(
            name, description, flags, trace.guards, built.scalars, trace.scalars, trace.names
        ),
        dtype=request.dtype,
        fused=request.fused,
        first_step_only=first_step_only,
        state_before=inputs.names,
        state_after=inputs.names | frozenset(trace.flat) | frozenset(trace.scalars),
    )


def _checked(request: _Request, program: UpdateProgram, inputs: StepInputs) -> UpdateProgram:
    """``program``, if it does what the optimizer does."""
    if not agrees(program, request.optimizer, request.group, inputs):
        raise OptimizerError(
            f"expected the traced update of {program.optimizer} to give the same bits as its step(), found a "
            "difference: its step depends on something other than parameter, gradient, state[p] and the numbers in "
            "param_groups, or sends those numbers through a function of math"
        )
    return program
