"""Check a traced update against the optimizer itself, on a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from zerofx.optimizers.program import UpdateProgram, run_program
from zerofx.optimizers.scalars import Hyper
from zerofx.optimizers.shadow import make_shadow, map_numbers, run_step, sample
from zerofx.optimizers.trace import StepInputs

_LENGTH: Final = 23
# Hyperparameters as they are, and a little smaller: a value that was frozen into the program shows.
_SCALES: Final = (1.0, 1.0 - 2.0**-6)
_NOT_WRITTEN: Final = 7.0


def agrees(
    program: UpdateProgram, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], inputs: StepInputs
) -> bool:
    """Whether ``program`` and one step of ``optimizer`` from ``inputs`` give the same bits.

    Without inputs the optimizer makes its state, and the program starts from the initial values of its specs.
    """
    if program.fused:
        # A fused kernel is torch's own, and may be right for a dtype on other devices only: check how it is wired up.
        states = tuple(replace(spec, dtype=torch.float32) for spec in program.states)
        program = replace(program, dtype=torch.float32, states=states)
        inputs = replace(inputs, flat=dict.fromkeys(inputs.flat, torch.float32))
    return all(_agrees_at(scale, program, optimizer, group, inputs) for scale in _SCALES)


def _agrees_at(
    scale: float, program: UpdateProgram, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], inputs: StepInputs
) -> bool:
    def scaled(where: Hyper, value: int | float) -> int | float:
        return value * scale if isinstance(value, float) else value

    hypers = map_numbers(group, scaled)
    states, scalar_states = _inputs_of_program(program, inputs)
    if program.host()(hypers, _clone(scalar_states)) is None:
        return scale != 1.0
    shape = (_LENGTH,)
    param = sample(shape, program.dtype, -1.1, 1.2)
    shadow_param = param.clone().requires_grad_()
    shadow_param.grad = sample(shape, program.dtype, 0.8, -0.6)
    shadow = make_shadow(optimizer, hypers, shadow_param, fused=program.fused)
    if inputs.names:
        before = _clone({**states, **scalar_states})
        shadow.state[shadow_param] = {name: before[name] for name in inputs.names}
    run_step(shadow)
    run_program(program, param, sample(shape, program.dtype, 0.8, -0.6), states, scalar_states, hypers)
    expected = {"param": shadow_param.detach(), **shadow.state.get(shadow_param, {})}
    results = {"param": param, **states, **scalar_states}
    return expected.keys() <= results.keys() and all(_same(results[name], value) for name, value in expected.items())


def _inputs_of_program(program: UpdateProgram, inputs: StepInputs) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    shape = (_LENGTH,)
    if not inputs.names:
        states = program.new_states(_LENGTH)
        for spec in program.states:
            if spec.written_first:
                states[spec.name].fill_(_NOT_WRITTEN)
        return states, program.new_scalar_states()
    states = {name: sample(shape, dtype, 0.1, 0.9) for name, dtype in inputs.flat.items()}
    scalars: dict[str, Any] = {
        name: value if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")
        for name, (dtype, value) in inputs.scalars.items()
    }
    # States that the step adds to those present.
    added = {name: tensor for name, tensor in program.new_states(_LENGTH).items() if name not in states}
    added_scalars = {name: value for name, value in program.new_scalar_states().items() if name not in scalars}
    return states | added, scalars | added_scalars


def _clone(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)
    return a.dtype == b.dtype and torch.allclose(a, b.detach(), rtol=0.0, atol=0.0, equal_nan=True)
