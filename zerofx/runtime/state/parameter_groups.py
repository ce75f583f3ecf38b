"""Parameters of a model that its optimizers train, and which of those may share a bucket.

What an optimizer has seen of a parameter so far, its history, is its states and the numbers among them: parameters with
different histories cannot be updated as one.
"""

from __future__ import annotations

import torch
from torch import nn

from zerofx.capture.checks import check_owner
from zerofx.errors import OptimizerError
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.tensor_parts import named_parameters, parameters_of
from zerofx.optimizers import Optimizers
from zerofx.units import first_few


def group_of_parameters(
    model: nn.Module, optimizers: Optimizers, parameters: tuple[ParameterInfo, ...], with_gradient: set[str]
) -> dict[str, int]:
    """The index of the param group of each parameter that the step trains, by name.

    A parameter that is frozen, or that the loss does not depend on, is not trained, as in eager mode.

    Raises:
        OptimizerError: an optimizer holds a tensor that is not the model's, or another's; or a parameter that gets a
            gradient is in none.
    """
    names = {id(p): name for name, p in named_parameters(model)}
    check_owner(model, optimizers)
    groups = {names[id(p)]: index for index, group in enumerate(optimizers.param_groups) for p in parameters_of(group)}
    missing = [info.name for info in parameters if info.name in with_gradient and info.name not in groups]
    if missing:
        raise OptimizerError(
            f"expected every trainable parameter in the optimizer, found {len(missing)} that are not: "
            f"{first_few(missing)}. To train them, add them to a param group; to leave them as they are, call "
            f"requires_grad_(False) on them"
        )
    return {name: index for name, index in groups.items() if name in with_gradient}


def histories_of(model: nn.Module, optimizers: Optimizers) -> dict[str, str]:
    """Texts that tell parameters which were trained in other steps from each other, by name: their optimizer, their
    states, and the numbers among them, such as steps. Empty where all are alike.

    Parameters that no optimizer has, which have no history, are alike to those of the first."""
    holders = optimizers.holders()
    holder = {name: holders.get(id(p), 0) for name, p in named_parameters(model)}
    entries = {name: (p, optimizers.each[holder[name]].state.get(p, {})) for name, p in named_parameters(model)}
    # Of a parameter of one element, states look like numbers.
    numbers = {
        state
        for parameter, entry in entries.values()
        for state, value in entry.items()
        if parameter.dim() and (isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim()))
    }
    texts = {
        name: repr(
            [holder[name]]
            + [
                (state, float(value) if state in numbers else "")
                for state, value in sorted(entry.items(), key=lambda item: item[0])
            ]
        )
        for name, (_, entry) in entries.items()
    }
    return texts if len(set(texts.values())) > 1 else {}
