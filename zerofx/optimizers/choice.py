"""Questions about an optimizer that do not depend on how its update is made: is it supported, which states has it."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.complex_parts import check_parts
from zerofx.optimizers.following.follower import Follower
from zerofx.optimizers.following.stand_in import StandIn
from zerofx.optimizers.support import refuse_by_name
from zerofx.optimizers.update import scalars_by_shape, state_names


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update cannot run on flat shards.

    Raises:
        OptimizerError: it names the optimizer and the operator, state or option that is in the way.
    """
    stand_ins: list[StandIn] = []
    for index, group in enumerate(optimizer.param_groups):
        refuse_by_name(optimizer, group)
        dtypes = dict.fromkeys(param.dtype for param in group["params"] if param.requires_grad)
        stand_ins += [_stand_in(optimizer, index, dtype) for dtype in dtypes]
    if stand_ins:
        Follower(optimizer).programs(stand_ins)
    for group in optimizer.param_groups:
        for dtype in dict.fromkeys(param.dtype for param in group["params"] if param.requires_grad):
            if dtype.is_complex:
                check_parts(optimizer, group, dtype)


def _stand_in(optimizer: torch.optim.Optimizer, index: int, dtype: torch.dtype) -> StandIn:
    """What stands for a group's parameters of one dtype, with the states that the constructor made for the first."""
    group = optimizer.param_groups[index]
    states = [optimizer.state[p] for p in group["params"] if p.dtype == dtype and optimizer.state.get(p)]
    state: dict[str, Any] = states[0] if states else {}
    real = dtype.to_real() if dtype.is_floating_point or dtype.is_complex else dtype
    scalars = scalar_state_names(optimizer, index, dtype=real) if state else frozenset()
    flat = {name: value.dtype.to_real() for name, value in state.items() if name not in scalars and value is not None}
    return StandIn(
        index, real, tuple(flat.items()), tuple((name, value) for name, value in state.items() if name not in flat)
    )


def scalar_state_names(
    optimizer: torch.optim.Optimizer, index: int, *, dtype: torch.dtype, fused: bool = False
) -> frozenset[str]:
    """The states of which all parameters that are updated together have one value; of others each has its own.

    The update says which, since a 0-dim parameter's states are all alike; of states that its present options do not
    make, or of an optimizer that cannot run, what the parameters of more dimensions in the group ``index`` hold.
    ``dtype`` and ``fused`` are those of ``trace_update``.
    """
    held = scalars_by_shape(optimizer, optimizer.param_groups[index])
    flat, scalars = _states_of_update(optimizer, index, dtype, fused)
    return scalars | frozenset(name for name in held.keys() - flat.keys() if held[name])


def flat_state_dtypes(
    optimizer: torch.optim.Optimizer, index: int, *, dtype: torch.dtype, fused: bool = False
) -> dict[str, torch.dtype]:
    """The dtypes that the optimizer gives its states by itself, of those that each element of a parameter has.

    Arguments are those of ``scalar_state_names``.
    """
    return _states_of_update(optimizer, index, dtype, fused)[0]


def _states_of_update(
    optimizer: torch.optim.Optimizer, index: int, dtype: torch.dtype, fused: bool
) -> tuple[dict[str, torch.dtype], frozenset[str]]:
    """The states that a group's update makes: those that are flat, with dtypes, and scalars; none if it cannot run."""
    try:
        return state_names(optimizer, optimizer.param_groups[index], dtype=dtype, fused=fused)
    except OptimizerError:
        try:
            return Follower(optimizer).state_names(StandIn(index, dtype))
        except OptimizerError:  # what makes the update to run it says what is in the way
            return {}, frozenset()
