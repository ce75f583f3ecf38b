"""The updates of later steps, as far as they can be traced before the first step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch

from zerofx.optimizers.program import UpdateProgram
from zerofx.optimizers.update import trace_update

STEPS: Final = 12  # RAdam, of those that decide by a count, is the last to change its update: in the sixth step


def programs_ahead(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], program: UpdateProgram, scalars: Mapping[str, Any]
) -> list[UpdateProgram]:
    """The different updates of some steps from the coming one on, which ``program`` does, in their order.

    ``group``: the param group as it is now; ``scalars``: values of the scalar states before the coming step.

    Raises:
        OptimizerError: a later update cannot be traced.
    """
    different, host = {program.key: program}, program.host()
    state = program.new_scalar_states() | dict(scalars)
    present = program.state_before
    for _ in range(STEPS):
        after = copy.deepcopy(state)
        if present != program.state_before or host(group, after) is None:
            program = trace_update(
                optimizer, group, state_present=present, dtype=program.dtype, fused=program.fused,
                scalar_values={name: float(value) for name, value in state.items() if name in present},
            )  # fmt: skip
            different.setdefault(program.key, program)
            after = program.new_scalar_states() | copy.deepcopy(state)
            host = program.host()
            host(group, after)
        state, present = after, program.state_after
    return list(different.values())
