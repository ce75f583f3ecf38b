"""A checkpoint taken over by a step: checked whole first, then read a tensor of a bucket at a time, by any ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.checkpoints.fitting import check_optimizer, saved_names, warn_of_rounding
from zerofx.checkpoints.names import ModelNames, number_from, set_extra, set_groups
from zerofx.checkpoints.pieces import pieces_of
from zerofx.checkpoints.random_states import saved_random_states, set_random_states
from zerofx.checkpoints.together import on_all
from zerofx.checkpoints.training import Training
from zerofx.checkpoints.user_state import saved_state, take_over
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.folder import resolve
from zerofx.disk.checkpoint.marker import Scalar
from zerofx.disk.checkpoint.plain import from_plain
from zerofx.disk.checkpoint.reader import STATE, CheckpointReader, state_name
from zerofx.errors import CheckpointError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.on_host import overwrite, shown_on_host
from zerofx.runtime.state.state import BucketState

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checked:
    """A checkpoint that is whole, and fits model and optimizer.

    ``saved``: names in it by the model's names. ``state``: what is loaded for the user, ``random``: for generators.
    ``scalars``: the optimizer's numbers by the saved names of parameters.
    """

    reader: CheckpointReader
    names: ModelNames
    saved: Mapping[str, str]
    state: Mapping[str, Any]
    random: dict[str, torch.Tensor]
    scalars: Mapping[str, tuple[Scalar, ...]]

    def history(self, own: str) -> tuple[tuple[str, ...], tuple[Scalar, ...]]:
        """The optimizer's states of a parameter: names of those with a value for each element, and the others."""
        name = self.parameter(own)
        return self.reader.marker.optimizer.states.get(name, ()), self.scalars.get(name, ())

    def parameter(self, own: str) -> str:
        """The name in the checkpoint of the parameter that ``named_parameters`` calls ``own``."""
        return self.saved[self.names.parameters[own]]


def check(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], control: Control
) -> Checked:
    """Find a checkpoint, and check all that can be before anything is changed. Collective.

    Raises:
        CheckpointError: on all ranks.
    """
    reader = on_all(control, "find the checkpoint", lambda: CheckpointReader(resolve(path)))
    control.agree(
        "load a checkpoint",
        f"{reader.place.name}\n{reader.marker.to_json()}",
        "checkpoint",
        "Give every rank the same.",
    )
    on_all(control, "check the files of the checkpoint", lambda: reader.verify(control.rank, control.num_ranks))

    def fit() -> Checked:
        names = ModelNames.of(model)
        saved = saved_names(reader.marker, names)
        ids = {id(parameter): saved[names.parameters[own]] for own, parameter in model.named_parameters()}
        groups = [[ids[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        check_optimizer(reader.marker, optimizer, groups)
        given = saved_state(reader, state, control.rank)
        return Checked(
            reader, names, saved, given, saved_random_states(reader, control.rank), reader.marker.optimizer.scalars_of()
        )

    checked = on_all(control, "compare the checkpoint with the model", fit)
    warn_of_rounding(reader.place, reader.marker, checked.names, checked.saved)
    return checked


def load_model(checked: Checked, parameters: Mapping[str, torch.Tensor]) -> None:
    """Give whole parameters, by their own names, their values."""
    for own, parameter in parameters.items():
        _fill_whole(checked, checked.parameter(own), parameter)
    checked.reader.close()


def load_training(checked: Checked, training: Training) -> None:
    """Give the buckets of a model that a step has taken over their values, wherever these lie. Collective."""
    for bucket, held in training.buckets():
        _load_stored(checked, training, bucket, held)
        training.state.complete(held)
        if bucket.trainable:
            _load_states(checked, training, bucket, held)
    checked.reader.close()


def load_buffers(checked: Checked, rank: int) -> None:
    """Give the model's buffers their values: this rank's own, or rank 0's where there was no such rank."""
    shard = checked.reader.shard(STATE, rank) if rank < checked.reader.marker.num_ranks else None
    for name, buffer in checked.names.buffers.items():
        key = f"buffer.{checked.saved[name]}"
        if shard is not None and key in shard.placed:
            (placed,) = shard.placed[key]
            _real(buffer).copy_(checked.reader.read_entry(shard, placed))
        else:
            _fill_whole(checked, checked.saved[name], buffer)
    checked.reader.close()


def load_rest(
    checked: Checked, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, state: Mapping[str, Any]
) -> None:
    """Give hyperparameters, random generators, modules' extra state and what is the user's their values."""
    marker = checked.reader.marker
    set_extra(model, from_plain(marker.extra.get("modules", {}), _no_tensor))
    set_groups(optimizer, marker.optimizer.groups)
    set_random_states(checked.random, device)
    take_over(state, checked.state)


def entries_of(checked: Checked, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What the optimizer had for each parameter, by its own name: numbers, and in the place of tensors zeros that take
    no memory."""
    entries: dict[str, dict[str, Any]] = {}
    for own, parameter in parameters.items():
        states, scalars = checked.history(own)
        entry: dict[str, Any] = {scalar.state: number_from(scalar.value, scalar.dtype, _CPU) for scalar in scalars}
        for state in states:
            dtype = checked.reader.dtype_of(state_name(checked.parameter(own), state), STATE)
            dtype = dtype.to_complex() if parameter.is_complex() else dtype
            entry[state] = torch.zeros((), dtype=dtype).expand(parameter.shape)
        if entry:
            entries[own] = entry
    return entries


def check_histories(checked: Checked, layout: BucketLayout) -> None:
    """Check that the parameters of each bucket have states that are updated together.

    Raises:
        CheckpointError: they have not.
    """
    for bucket in layout.buckets:
        histories = {
            (states, tuple((scalar.state, repr(scalar.value), scalar.dtype) for scalar in scalars))
            for states, scalars in (checked.history(slot.source) for slot in bucket.slots)
        }
        if bucket.trainable and len(histories) > 1:
            raise CheckpointError(
                f"expected one history of all parameters of {bucket.name}, which are updated together, found that some "
                f"were trained otherwise than others: give them a param group of their own. Nothing has been loaded"
            )


def _load_stored(checked: Checked, training: Training, bucket: Bucket, held: BucketState) -> None:
    first, last = training.held(bucket)

    def fill(flat: torch.Tensor) -> None:
        flat.zero_()
        for piece in pieces_of(bucket, first, last):
            checked.reader.read_into(piece.view(flat, first), checked.parameter(piece.source), piece.box)

    overwrite(held.stored, fill, training.tiers)
    copies = [] if held.master is None else [held.low]
    copies += [held.delayed["low"]] if "low" in held.delayed else []
    if copies:
        with shown_on_host(held.stored, 0, last - first, training.tiers) as stored:

            def convert(flat: torch.Tensor) -> None:
                flat.copy_(stored)

            for copy in copies:
                overwrite(copy, convert, training.tiers)


def _load_states(checked: Checked, training: Training, bucket: Bucket, held: BucketState) -> None:
    first, last = training.held(bucket)
    sources = {slot.source: checked.parameter(slot.source) for slot in bucket.slots}
    states, scalars = checked.history(bucket.slots[0].source)
    held.scalars.clear()
    for name in held.flat.keys() - set(states):
        del held.flat[name]  # which then begins as it did before the first step
    for scalar in scalars:
        value = number_from(scalar.value, scalar.dtype, _CPU)
        training.state.set_scalar(bucket, scalar.state, value)
    for state in states:
        if state not in held.flat:
            dtype = checked.reader.dtype_of(state_name(next(iter(sources.values())), state), STATE)
            training.state.set_flat(bucket, state, torch.zeros(last - first, dtype=dtype, device=training.device))

        def fill(flat: torch.Tensor, state: str = state) -> None:
            flat.zero_()
            for piece in pieces_of(bucket, first, last):
                name = state_name(sources[piece.source], state)
                checked.reader.read_into(piece.view(flat, first), name, piece.box, STATE)

        overwrite(held.flat[state], fill, training.tiers)
    held.present = frozenset(states) | {scalar.state for scalar in scalars}


def _fill_whole(checked: Checked, name: str, tensor: torch.Tensor) -> None:
    real = _real(tensor)
    if real.numel():
        real.copy_(checked.reader.read(name, Box.whole(real.shape)))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"expected no tensor among what modules have saved, found {name}")
