"""Check that a checkpoint fits this model and optimizer; list the differences by name."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx.capture.checks import fits, misfits
from zerofx.checkpoints.names import ModelNames, options_from
from zerofx.disk.checkpoint.marker import Marker, TensorInfo
from zerofx.errors import CheckpointError
from zerofx.optimizers import Optimizers
from zerofx.units import first_few

_TOO_LARGE = 2**63  # for a whole number of an optimizer's, which torch takes as 64 bits


def match_names(marker: Marker, names: ModelNames) -> dict[str, str]:
    """The name in the checkpoint of each of the model's tensors, by its name now.

    Any of the names of a tied tensor matches, here or there.

    Raises:
        CheckpointError: lists tensors that are missing, that the model has not, and that have another shape or kind.
    """
    others: dict[str, list[str]] = {}
    for alias, name in names.aliases.items():
        others.setdefault(name, []).append(alias)
    by_name: dict[str, str] = {}
    for name in names.tensors:
        known = (marker.aliases.get(known_name, known_name) for known_name in (name, *others.get(name, ())))
        saved = next((known_name for known_name in known if known_name in marker.tensors), None)
        if saved is not None:
            by_name[name] = saved
    missing = [name for name in names.tensors if name not in by_name]
    unexpected = sorted(marker.tensors.keys() - set(by_name.values()))
    other = [
        f"{name} ({marker.tensors[saved]} for {TensorInfo.from_tensor(names.tensors[name])})"
        for name, saved in by_name.items()
        if not fits(marker.tensors[saved].shape, marker.tensors[saved].torch_dtype, names.tensors[name])
    ]
    problems = misfits(missing, unexpected, other)
    if problems:
        raise CheckpointError(
            f"expected a checkpoint with the {len(names.tensors)} tensors of this model, found {problems}: "
            f"load a checkpoint of this very model. Nothing has been loaded"
        )
    return by_name


def group_misfits(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> list[str]:
    """The differences between saved param groups and an optimizer's, in words; ``own``: the names of its parameters."""
    if len(saved) != len(own):
        return [f"{len(saved)} param groups for {len(own)}"]
    return [
        f"other parameters in param group {number} ({first_few(sorted(differ))})"
        for number, (group, mine) in enumerate(zip(saved, own, strict=True))
        if (differ := set(group["params"]) ^ set(mine))
    ]


def check_extra(marker: Marker, names: ModelNames) -> None:
    """Check that the modules with state of their own are those that were saved.

    Raises:
        CheckpointError: they are not.
    """
    if differ := sorted(marker.extra.get("modules", {}).keys() ^ names.extra.keys()):
        raise CheckpointError(
            f"expected a checkpoint with what the modules of this model give by get_extra_state(), found it for others "
            f"({first_few(differ)}): load a checkpoint of this very model. Nothing has been loaded"
        )


def _option_misfits(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of saved param groups whose kind differs from the optimizer's, in words."""
    return [
        f"{key}={value!r:.40} in param group {number}, where it has {mine[key]!r:.40}"
        for number, (group, mine) in enumerate(zip(saved, own, strict=True))
        for key, value in options_from(group).items()
        if key in mine and key != "params" and not _are_alike(value, mine[key])
    ]


def _are_alike(value: Any, own: Any) -> bool:
    if value is None or own is None:
        return True
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(own, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(own) and all(map(_are_alike, value, own))
    if isinstance(own, numbers.Number) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        return isinstance(value, numbers.Number) and not (isinstance(value, int) and abs(value) >= _TOO_LARGE)
    return isinstance(value, type(own))


def check_optimizers(marker: Marker, optimizers: Optimizers, own: Sequence[Sequence[str]]) -> None:
    """Check that the optimizers have the classes and the groups that were saved.

    ``own``: the names in the checkpoint of each group's parameters.

    Raises:
        CheckpointError: they have not; says what differs.
    """
    kind, saved = optimizers.kind, marker.optimizer
    problems = [f"one of {saved.name}"] if saved.name != kind else group_misfits(saved.groups, own)
    problems = problems or _option_misfits(saved.groups, optimizers.param_groups)
    if problems:
        raise CheckpointError(
            f"expected a checkpoint of this optimizer ({kind} with {len(own)} param groups), found "
            f"{first_few(problems)}: load with the optimizer that was saved, or the weights alone with "
            f"weights_only=True or zerofx.compile(weights=...). Nothing has been loaded"
        )
