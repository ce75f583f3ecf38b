"""Find and check a whole checkpoint, and load what is not in buckets (``fill.py`` loads those)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from zerofx.capture.checks import warn_of_rounding
from zerofx.checkpoints.fitting import check_extra, check_optimizers, match_names
from zerofx.checkpoints.names import ModelNames, number_from, options_from, set_extra, set_groups
from zerofx.checkpoints.random_states import predecessor, read_random_states, set_random_states
from zerofx.checkpoints.together import run_on_all, run_on_first
from zerofx.checkpoints.user_state import read_state, take_over
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.marker import NO_PARAMETER, STATE, Scalar, state_name
from zerofx.disk.checkpoint.plain import from_plain
from zerofx.disk.checkpoint.reader import CheckpointReader, open_checkpoint
from zerofx.errors import CheckpointError
from zerofx.ir.tensor_parts import named_parameters, parameters_of
from zerofx.optimizers import Optimizers
from zerofx.optimizers.outside import load_attributes
from zerofx.optimizers.whole.states import TensorAt, join_tensors, paths_in, places_in, tree_from_plain
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.mesh import Mesh

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loadable:
    """A checkpoint that is whole, and fits model and optimizers.

    ``saved``: its names by the model's names. ``before``: this rank's predecessor in it, whose own values it continues
    from, if any. ``state``: the user's state to load, ``random``: the generators' states. ``scalars``: the optimizer's
    numbers by the saved names of parameters.
    """

    reader: CheckpointReader
    names: ModelNames
    saved: Mapping[str, str]
    before: int | None
    state: Mapping[str, Any]
    random: dict[str, torch.Tensor]
    scalars: Mapping[str, tuple[Scalar, ...]]

    def parameter(self, own: str) -> str:
        """The name in the checkpoint of the parameter ``own`` of ``named_parameters``."""
        return self.saved[self.names.parameters[own]]

    def states(self, own: str) -> tuple[str, ...]:
        return self.reader.marker.optimizer.states.get(self.parameter(own), ())

    def numbers(self, own: str) -> dict[str, Any]:
        scalars = self.scalars.get(self.parameter(own), ())
        return {scalar.state: number_from(scalar.value, scalar.dtype, _CPU) for scalar in scalars}

    def read_into(self, into: torch.Tensor, own: str, state: str | None, box: Box) -> None:
        name = self.parameter(own)
        if state is None:
            self.reader.read_into(into, name, box)
        else:
            self.reader.read_into(into, state_name(name, state), box, STATE)

    def entry(self, own: str, kinds: Mapping[str, type[Any]]) -> Any:
        parameter = own if own.startswith(NO_PARAMETER) else self.parameter(own)
        plain = self.reader.marker.optimizer.owned.get(parameter)
        if plain is None:
            return None
        tree = tree_from_saved(plain, kinds)
        tensors = {path: self._read_state(parameter, path) for path in paths_in(tree)}
        return join_tensors(tree, tensors)

    def _read_state(self, parameter: str, path: str) -> torch.Tensor:
        name = state_name(parameter, path)
        return self.reader.read(name, Box.whole(self.reader.shape_of(name, STATE)), STATE)

    def dtype_of(self, own: str, state: str) -> torch.dtype:
        return self.reader.dtype_of(state_name(self.parameter(own), state), STATE)


def check(
    path: Path,
    model: nn.Module,
    optimizers: Optimizers | None,
    state: Mapping[str, Any],
    control: Control,
    mesh: Mesh,
) -> Loadable:
    """Find a checkpoint, and check as much as possible before anything is changed. Collective.

    ``optimizers`` are None where parameters and buffers alone are loaded. Ranks on ``mesh`` that share one
    computation draw alike.

    Raises:
        CheckpointError: on all ranks.
    """

    def find() -> str:
        first.append(open_checkpoint(path))
        return first[0].place.name if first[0].place != path else ""

    first: list[CheckpointReader] = []  # on rank 0, whose latest one it is: another process may finish the next
    name = run_on_first(control, "find the checkpoint", find)
    reader = run_on_all(control, "find the checkpoint", lambda: first[0] if first else open_checkpoint(path, name))
    control.agree(
        "load a checkpoint",
        f"{reader.place.name}, saved at {reader.marker.saved_at}\nweights_only={optimizers is None}\n"
        f"{xxhash.xxh3_128_hexdigest(reader.marker.to_json().encode())}",
        "checkpoint",
        "Give every rank the same.",
    )
    run_on_all(control, "check the files of the checkpoint", lambda: reader.verify(control.rank, control.num_ranks))

    def fit() -> Loadable:
        names = ModelNames.from_model(model)
        saved = match_names(reader.marker, names)
        if optimizers is not None:
            ids = {id(parameter): saved[names.parameters[own]] for own, parameter in named_parameters(model)}
            groups = [[ids[id(parameter)] for parameter in parameters_of(group)] for group in optimizers.param_groups]
            check_optimizers(reader.marker, optimizers, groups)
            check_extra(reader.marker, names)
        _check_for_files(reader, names, saved)
        marker, rank = reader.marker, control.rank % (mesh.num_ranks // mesh.pipe)
        before = predecessor(rank, mesh.model, marker.num_ranks // marker.num_pipe, marker.num_model)
        given, random = read_state(reader, state, before), read_random_states(reader, before, rank // mesh.model)
        return Loadable(reader, names, saved, before, given, random, marker.optimizer.scalars_of())

    checked = run_on_all(control, "compare the checkpoint with the model", fit)
    stored = {name: reader.marker.tensors[known].torch_dtype for name, known in checked.saved.items()}
    warn_of_rounding(f"values of the checkpoint at {reader.place}", stored, checked.names.tensors)
    return checked


def _check_for_files(reader: CheckpointReader, names: ModelNames, saved: Mapping[str, str]) -> None:
    """Check that weights in few bits were quantised alike where that is no tensor of the model's.

    Raises:
        CheckpointError: they were not.
    """
    for name in sorted(names.for_files):
        own = names.tensors[name]
        if not torch.equal(reader.read(saved[name], Box.whole(own.shape)), own.to("cpu")):
            raise CheckpointError(
                f"expected a checkpoint of a model that was quantised as this one is, found another {name}, which no "
                f"tensor of the model holds: quantise the same weights in the same way, and load again. Nothing has "
                f"been loaded"
            )


def load_model(checked: Loadable, parameters: Mapping[str, torch.Tensor]) -> None:
    """Load whole parameters, by their own names."""
    for own, parameter in parameters.items():
        _fill_whole(checked, checked.parameter(own), parameter)


def load_buffers(checked: Loadable) -> None:
    """Load the model's buffers: those of this rank's predecessor, or rank 0's if there was none."""
    shard = checked.reader.shard(STATE, checked.before) if checked.before is not None else None
    for name, buffer in checked.names.buffers.items():
        key = f"buffer.{checked.saved[name]}"
        if shard is not None and key in shard.placed:
            (placed,) = shard.placed[key]
            _real(buffer).copy_(checked.reader.read_entry(shard, placed))
        else:
            _fill_whole(checked, checked.saved[name], buffer)


def load_rest(
    checked: Loadable,
    model: nn.Module,
    optimizers: Optimizers,
    device: torch.device,
    state: Mapping[str, Any],
) -> None:
    """Load hyperparameters, random generators, modules' extra state and the user's own state."""
    marker = checked.reader.marker
    set_extra(model, from_plain(marker.extra.get("modules", {})))
    set_groups(optimizers, map(options_from, marker.optimizer.groups))
    for optimizer, entries in zip(optimizers.each, marker.extra.get("optimizers", ()), strict=False):
        load_attributes(optimizer, from_plain(entries))
    set_random_states(checked.random, device)
    take_over(state, checked.state)


def entries_of(checked: Loadable, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The optimizer's entries for each parameter, by its own name: numbers, and zeros without memory for tensors."""
    entries: dict[str, dict[str, Any]] = {}
    for own, parameter in parameters.items():
        entry = checked.numbers(own)
        for state in checked.states(own):
            dtype = checked.dtype_of(own, state)
            dtype = dtype.to_complex() if parameter.is_complex() else dtype
            entry[state] = torch.zeros((), dtype=dtype, device="cpu").expand(parameter.shape)
        plain = checked.reader.marker.optimizer.owned.get(checked.parameter(own))
        if plain is not None and not _has_subclasses(plain):
            tree = tree_from_saved(plain, {})
            places = {place.path: place for place in places_in(tree)}
            name = checked.parameter(own)
            tensors = {path: _without_memory(checked.reader, name, place) for path, place in places.items()}
            entry = join_tensors(tree, tensors)
        if entry:
            entries[own] = entry
    return entries


def _without_memory(reader: CheckpointReader, parameter: str, place: TensorAt) -> torch.Tensor:
    name = state_name(parameter, place.path)
    shape, dtype = reader.shape_of(name, STATE), reader.dtype_of(name, STATE)
    if place.stride:
        return torch.empty_strided(shape, place.stride, dtype=dtype, device="meta")
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


def _has_subclasses(plain: Any) -> bool:
    """True for states with tensors or objects of classes that the optimizer's first step makes."""
    if isinstance(plain, dict):
        return not plain.keys().isdisjoint({"wrapped", "object", "enum"}) or any(map(_has_subclasses, plain.values()))
    return isinstance(plain, list) and any(map(_has_subclasses, plain))


def tree_from_saved(plain: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """States of a parameter that is updated whole, without their tensors, as the marker has them.

    Raises:
        CheckpointError: it cannot have been saved.
    """
    try:
        return tree_from_plain(plain, kinds)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"expected states of the optimizer as they were saved, found {plain!r:.80} ({error}): load another one"
        ) from error


def _fill_whole(checked: Loadable, name: str, tensor: torch.Tensor) -> None:
    real = _real(tensor)
    if real.numel():
        real.copy_(checked.reader.read(name, Box.whole(real.shape)))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached
