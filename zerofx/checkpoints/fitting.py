"""Whether a checkpoint is one of this model and optimizer; what differs, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zerofx.capture.checks import misfits
from zerofx.checkpoints.names import ModelNames
from zerofx.disk.checkpoint.marker import Marker, TensorInfo
from zerofx.errors import CheckpointError, warn
from zerofx.precision import dtype_name
from zerofx.units import first_few


def saved_names(marker: Marker, names: ModelNames) -> dict[str, str]:
    """The name in the checkpoint of each of the model's tensors, by its name now.

    Of a tied tensor, here or there, any of its names will do.

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
        f"{name} ({marker.tensors[saved]} for {TensorInfo.of(names.tensors[name])})"
        for name, saved in by_name.items()
        if not _fits(marker.tensors[saved], names.tensors[name])
    ]
    problems = misfits(missing, unexpected, other)
    if problems:
        raise CheckpointError(
            f"expected a checkpoint with the {len(names.tensors)} tensors of this model, found {problems}: "
            f"load a checkpoint of this very model. Nothing has been loaded"
        )
    return by_name


def warn_of_rounding(place: Path, marker: Marker, names: ModelNames, saved: Mapping[str, str]) -> None:
    """Warn where the model's dtypes cannot hold what was saved."""
    rounded: dict[tuple[torch.dtype, torch.dtype], str] = {}
    for name, tensor in names.tensors.items():
        dtype = marker.tensors[saved[name]].torch_dtype
        if torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
            rounded.setdefault((dtype, tensor.dtype), name)
    for (dtype, own), name in rounded.items():
        warn(
            f"values of the checkpoint at {place} are rounded from {dtype_name(dtype)} to the model's "
            f"{dtype_name(own)}, as {name} is"
        )


def check_optimizer(marker: Marker, optimizer: torch.optim.Optimizer, own: Sequence[Sequence[str]]) -> None:
    """Check that the optimizer is of the class, and has the groups, that were saved.

    ``own``: the names in the checkpoint of each group's parameters.

    Raises:
        CheckpointError: it is not; says what differs.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    saved = marker.optimizer
    problem = ""
    if saved.name != kind:
        problem = f"one of {saved.name}"
    elif len(saved.groups) != len(own):
        problem = f"{len(saved.groups)} param groups for {len(own)}"
    else:
        for number, (group, mine) in enumerate(zip(saved.groups, own, strict=True)):
            if differ := sorted(set(group["params"]) ^ set(mine)):
                problem = f"other parameters in param group {number} ({first_few(differ)})"
                break
    if problem:
        raise CheckpointError(
            f"expected a checkpoint of this optimizer ({kind} with {len(own)} param groups), found {problem}: load "
            f"with the optimizer that was saved, or the weights alone with zerofx.compile(weights=...). Nothing has "
            f"been loaded"
        )


def _fits(saved: TensorInfo, tensor: torch.Tensor) -> bool:
    if saved.shape != tuple(tensor.shape):
        return False
    dtype = saved.torch_dtype
    return dtype == tensor.dtype or (dtype.is_floating_point and tensor.is_floating_point())
