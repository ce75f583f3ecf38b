"""Names of the model's tensors, and of the optimizer's groups, in a checkpoint."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.disk.checkpoint.plain import from_plain, to_plain
from zerofx.errors import CheckpointError
from zerofx.ir.tensor_parts import is_table, named_buffers, named_parameters, parameters_of, parts_of, path_name
from zerofx.optimizers import Optimizers
from zerofx.precision import dtype_name, dtype_named

# Not taken over: how an update is computed is a matter of the machine, and does not change what it computes.
_OF_MACHINE = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class ModelNames:
    """The model's tensors by their names in its ``state_dict()``.

    ``parameters``: the name in the checkpoint by the name in ``named_parameters``. ``buffers``: persistent buffers. The
    first name of a tensor with several counts; ``aliases`` maps the others to it. ``extra``: the results of modules'
    ``get_extra_state``. ``for_files``: the buffers that a module makes anew of what a weight in few bits has.
    """

    parameters: dict[str, str]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    extra: dict[str, Any]
    for_files: frozenset[str] = frozenset()

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelNames:
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        extra: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor) or key.endswith("_extra_state"):
                extra[key] = value
            elif id(value) in first:
                aliases[key] = first[id(value)]
            else:
                first[id(value)], tensors[key] = key, value
        in_parts = {name: parts for name, whole in model.named_parameters() if (parts := parts_of(whole))}
        own = {id(tensor) for _, tensor in (*named_parameters(model), *named_buffers(model))}
        for_files: set[str] = set()
        for name, parts in in_parts.items():
            of_module = [key for key in tensors if key.startswith(f"{name}.")]
            for_files.update(key for key in of_module if id(tensors[key]) not in own)
            if "" not in parts:
                tensors.pop(name, None)  # which has no memory of its own
            if not of_module:
                tensors |= {path_name(name, path): part for path, part in parts.items() if is_table(part)}
        parameters = {name: first.get(id(tensor), name) for name, tensor in named_parameters(model)}
        tensors |= {parameters[name]: tensor for name, tensor in named_parameters(model)}
        owned = set(parameters.values())
        buffers = {name: tensor for name, tensor in tensors.items() if name not in owned}
        return cls(parameters, tensors, buffers, aliases, extra, frozenset(for_files))


def set_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Restore the state that modules returned from ``get_extra_state``."""
    for key, value in extra.items():
        model.get_submodule(key.rpartition("_extra_state")[0].rstrip(".")).set_extra_state(value)


def groups_of(optimizers: Optimizers, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The param groups as JSON; ``names`` are those of parameters, by their ids.

    Raises:
        CheckpointError: an option is neither a number, a word, nor a list or tensor of one.
    """
    groups = []
    for number, group in enumerate(optimizers.param_groups):
        plain: dict[str, Any] = {
            key: _to_plain(value, f"param_groups[{number}].{key}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append(plain | {"params": [names[id(parameter)] for parameter in parameters_of(group)]})
    return groups


def options_from(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options and the names of its parameters, from a group of ``groups_of``."""
    return {key: from_plain(value) for key, value in plain.items()}


def set_groups(optimizers: Optimizers, groups: Iterable[Mapping[str, Any]]) -> None:
    """Restore the hyperparameters from param groups as ``options_from`` gives them; tensors stay the same objects."""
    for group, saved in zip(optimizers.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in _OF_MACHINE:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            elif isinstance(value, torch.Tensor):
                group[key] = value.item() if isinstance(group.get(key), (int, float)) else value.clone()
            elif isinstance(own := group.get(key), enum.Enum):
                group[key] = type(own)(value)
            else:
                group[key] = value


def number_of(value: Any) -> tuple[Any, str | None]:
    """A number, or a tensor of one, as JSON: its value, and the tensor's dtype."""
    if isinstance(value, torch.Tensor):
        return _to_plain(value.tolist(), "a number"), dtype_name(value.dtype)
    return _to_plain(value, "a number"), None


def number_from(value: Any, dtype: str | None, device: torch.device) -> Any:
    """The argument of ``number_of``, from its results; a tensor is on ``device``."""
    number = from_plain(value)
    return torch.tensor(number, dtype=dtype_named(dtype), device=device) if dtype is not None else number


def _to_plain(value: Any, what: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = to_plain(value.item(), what, {})
        return {"$number": [number, dtype_name(value.dtype), list(value.shape)]}
    tensors: dict[str, torch.Tensor] = {}
    plain = to_plain(value, what, tensors)
    if tensors:
        raise CheckpointError(
            f"expected numbers, words, and lists of them as the optimizer's options, found a tensor of several "
            f"elements in {what}: keep it in the model, or in what state= saves"
        )
    return plain
