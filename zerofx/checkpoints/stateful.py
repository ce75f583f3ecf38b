"""Implement ``step.state_dict()`` and ``load_state_dict()``: all state by name, for DCP or as whole tensors."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx.checkpoints.distributed import BoxedTensor
from zerofx.checkpoints.fitting import group_misfits
from zerofx.checkpoints.names import ModelNames, set_groups
from zerofx.checkpoints.pieces import Piece, pieces_of
from zerofx.checkpoints.random_states import predecessor, random_states, set_random_states, states_for
from zerofx.checkpoints.save import StepCounts
from zerofx.checkpoints.training import Training
from zerofx.disk.checkpoint.boxes import Box
from zerofx.errors import CheckpointError
from zerofx.ir.buckets import Bucket
from zerofx.ir.tensor_parts import parameters_of
from zerofx.optimizers import initial_scalars
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.on_host import read_on_host
from zerofx.units import first_few

MODEL, OPTIMIZER, OWN = "model", "optimizer", "zerofx"


def state_of(training: Training, names: ModelNames, numbers: StepCounts) -> dict[str, Any]:
    """The state in the form of DCP's ``get_state_dict``, and the step's other state as JSON. Collective.

    Before the first update the optimizers' initial states are there, to be loaded into.
    """
    has_owners = bool(training.state.owners)
    if training.state.layout.mesh.pipe > 1:  # other stages may have some
        has_owners = any(training.control.gather(has_owners, "look for owners of states"))
    if has_owners:
        raise CheckpointError(
            f"expected an optimizer whose states have a value for each element, found "
            f"{training.optimizers.name}, whose states have shapes of their own: use step.save_checkpoint(), or "
            f"step.full_state_dict() and optimizer.state_dict()"
        )
    latest = _Latest(training)
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    initial: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
    held_by: dict[str, list[tuple[Bucket, BucketState]]] = {}
    for bucket, held in training.buckets():
        for source in dict.fromkeys(slot.source for slot in bucket.slots):
            held_by.setdefault(source, []).append((bucket, held))
    for source, places in held_by.items():
        parameter, name = training.state.parameter(source), names.parameters[source]
        owned = {
            p: b
            for b, _ in places
            for p in training.pieces_to_write(b, *training.range_to_write(b))
            if p.source == source
        }
        mine = [p for b, _ in places for p in pieces_of(b, *training.local_range(b)) if p.source == source]
        first, held = places[0]
        model[name] = _make_boxed(latest, parameter, first.dtype, None, owned, mine)
        if first.trainable:
            assert first.group is not None
            key = (first.group, first.dtype)
            if not held.present and key not in initial:
                at, index = training.optimizers.places()[first.group]
                initial[key] = initial_scalars(training.optimizers.each[at], index, dtype=first.dtype)
            scalars = held.scalars if held.present else initial[key]
            present = held.present or scalars.keys() | held.flat.keys()
            states[name] = {n: _number(v) for n, v in scalars.items() if n in present}
            states[name] |= {
                n: _make_boxed(latest, parameter, v.dtype, n, owned, mine) for n, v in held.flat.items() if n in present
            }
    if training.state.elsewhere:
        _add_stages(training, names, model, states)
    for alias, name in names.aliases.items():
        if name in model:
            model[alias] = model[name]
    model |= {name: buffer.detach() for name, buffer in names.buffers.items()}
    drawn = {
        name: base64.b64encode(value.numpy().tobytes()).decode()
        for name, value in random_states(training.device).items()
    }
    own = {
        "num_steps": numbers.num_steps,
        "num_skipped": numbers.num_skipped,
        "extra": dict(numbers.extra),
        "has_begun": any(held.present for _, held in training.buckets()),
        "num_model": training.state.layout.mesh.model,
        "num_pipe": training.state.layout.mesh.pipe,
        "random": training.control.gather(drawn, "take down the random generators"),
    }
    ids = {id(training.state.parameter(own_name)): name for own_name, name in names.parameters.items()}
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [ids[id(parameter)] for parameter in parameters_of(group)]}
        for group in training.optimizers.param_groups
    ]
    return {MODEL: model, OPTIMIZER: {"state": states, "param_groups": groups}, OWN: json.dumps(own)}


def _add_stages(
    training: Training, names: ModelNames, model: dict[str, torch.Tensor], states: dict[str, dict[str, Any]]
) -> None:
    """Add what other stages have, of which this rank writes and reads nothing. Collective."""
    own = {name: (tensor.dtype, _describe(states.get(name))) for name, tensor in model.items()}
    parameters = {name: training.state.parameter(source) for source, name in names.parameters.items()}

    def make_empty(name: str, dtype: torch.dtype) -> BoxedTensor:
        return BoxedTensor(parameters[name], dtype, (), (), lambda _: parameters[name])

    for of_rank in training.control.gather(own, "list the state of stages"):
        for name in of_rank.keys() - own.keys():
            dtype, entry = of_rank[name]
            model[name] = make_empty(name, dtype)
            if entry is not None:
                states[name] = {
                    key: make_empty(name, value) if isinstance(value, torch.dtype) else value
                    for key, value in entry.items()
                }


def _describe(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """States of a parameter, with the dtype in the place of those that are boxes."""
    if entry is None:
        return None
    return {key: value.dtype if isinstance(value, BoxedTensor) else value for key, value in entry.items()}


def _make_boxed(
    latest: _Latest, like: torch.Tensor, dtype: torch.dtype, state: str | None, owned: Mapping[Piece, Bucket],
    held: Sequence[Piece],
) -> BoxedTensor:  # fmt: skip
    of_model = dtype.to_complex() if like.is_complex() else dtype
    return BoxedTensor(
        like, of_model, list(owned), held, lambda piece: latest.read(owned[piece], state, piece), latest.forget
    )


class Loaded:
    """A state dictionary to be loaded: filled by DCP, or with whole tensors.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or nothing has been loaded into it.
    """

    def __init__(self, state: Mapping[str, Any], training: Training, names: ModelNames) -> None:
        self._names = names
        optimizer = state.get(OPTIMIZER)
        _check_form(state[MODEL], optimizer)
        self._model: Mapping[str, Any] = state[MODEL]
        self.groups: list[dict[str, Any]] | None = optimizer["param_groups"] if optimizer is not None else None
        entries = optimizer["state"] if optimizer is not None else {}
        self.own: dict[str, Any] = json.loads(state[OWN]) if OWN in state else {}
        if not self.own.get("has_begun", True):
            entries = {}
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        self._numbers: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        flat = {slot.source: held.flat.keys() for b, held in training.buckets() for slot in b.slots}
        for own, name in names.parameters.items():
            parameter = training.state.parameter(own)
            problems += _problems(name, self._model.get(name), parameter)
            entry = {key: value for key, value in entries.get(name, {}).items() if value is not None}
            with_flat = flat.get(own, ())
            self._states[own] = {key: value for key, value in entry.items() if _is_flat(value, key in with_flat)}
            self._numbers[own] = {key: value for key, value in entry.items() if key not in self._states[own]}
            for key, value in self._states[own].items():
                problems += _problems(f"{key} of {name}", value, parameter)
        for name, buffer in names.buffers.items():
            problems += _problems(name, self._model.get(name), buffer)
        if self.groups is not None:
            known = {id(training.state.parameter(own)): name for own, name in names.parameters.items()}
            groups = [[known[id(p)] for p in parameters_of(group)] for group in training.optimizers.param_groups]
            problems += group_misfits(self.groups, groups)
        if problems:
            raise CheckpointError(
                f"expected a state dictionary of this step, or with whole tensors of this model, found "
                f"{first_few(problems)}. Nothing has been loaded"
            )

    @property
    def has_optimizer(self) -> bool:
        return self.groups is not None

    def numbers_after(self, before: StepCounts) -> StepCounts:
        """A step's counts after loading; absent ones are taken from ``before``."""
        own = self.own
        return StepCounts(
            own.get("num_steps", before.num_steps), own.get("num_skipped", before.num_skipped), own.get("extra", {})
        )

    def states(self, own: str) -> tuple[str, ...]:
        return tuple(self._states[own])

    def numbers(self, own: str) -> dict[str, Any]:
        return {
            name: value.detach().cpu().reshape(()).clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._numbers[own].items()
        }

    def read_into(self, into: torch.Tensor, own: str, state: str | None, box: Box) -> None:
        values = self._model[self._names.parameters[own]] if state is None else self._states[own][state]
        if isinstance(values, BoxedTensor):
            into.copy_(values.get_loaded(box))
        else:
            real = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
            into.copy_(box.select(real, Box.whole(real.shape)))

    def entry(self, own: str, kinds: Mapping[str, type[Any]]) -> Any:
        return None

    def dtype_of(self, own: str, state: str) -> torch.dtype:
        return self._states[own][state].dtype.to_real()

    def finish(self, training: Training) -> None:
        """Load the state outside buckets."""
        for name, buffer in self._names.buffers.items():
            buffer.copy_(self._model[name])
        if self.groups is not None:
            set_groups(training.optimizers, self.groups)
        if "random" in self.own:
            drawn = [
                {
                    name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
                    for name, text in by_name.items()
                }
                for by_name in self.own["random"]
            ]
            mesh = training.state.layout.mesh
            rank, num_model = training.control.rank % training.state.layout.num_stage_ranks, mesh.model
            num_ranks = len(drawn) // self.own.get("num_pipe", 1)
            before = predecessor(rank, num_model, num_ranks, self.own.get("num_model", 1))
            set_random_states(states_for(before, rank // num_model, drawn), training.device)


class _Latest:
    """The last values read of the buckets: DCP reads bucket by bucket, piece by piece, maybe from several threads."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._lock = threading.Lock()
        self._bucket = -1
        self._values: dict[str | None, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the values: steps may have been done since they were read."""
        with self._lock:
            self._bucket, self._values = -1, {}

    def read(self, bucket: Bucket, state: str | None, piece: Piece) -> torch.Tensor:
        """The values of a piece on the CPU, which are the caller's own."""
        training = self._training
        first, last = training.range_to_write(bucket)
        begin = training.local_range(bucket)[0]
        with self._lock:
            if bucket.index != self._bucket:
                self._bucket, self._values = bucket.index, {}
            if state not in self._values:
                held = training.state.buckets[bucket.index]
                stored = held.stored if state is None else held.flat[state]
                with read_on_host(stored, first - begin, last - begin, training.tiers) as shown:
                    self._values[state] = shown.clone()
            values = self._values[state]
        return piece.view(values, first).clone(memory_format=torch.contiguous_format)


def _number(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _is_flat(value: Any, is_known: bool) -> bool:
    return isinstance(value, BoxedTensor) or (isinstance(value, torch.Tensor) and (is_known or value.dim() > 0))


def _check_form(model: object, optimizer: object) -> None:
    """Check that a state dictionary has mappings by name, and the states of parameters by theirs.

    Raises:
        CheckpointError: it has not.
    """
    if not isinstance(model, Mapping):
        raise CheckpointError(f"expected 'model' to be model.state_dict(), found {type(model).__name__}")
    parts: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
    has_numbers = any(isinstance(name, int) for group in parts.get("param_groups", ()) for name in group["params"])
    if optimizer is not None and (not {"state", "param_groups"} <= parts.keys() or has_numbers):
        shown = "parameters by number" if has_numbers else type(optimizer).__name__
        raise CheckpointError(
            f"expected 'optimizer' to have 'state' and 'param_groups' with parameters by name, as "
            f"torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives them, found {shown}: "
            f"optimizer.load_state_dict takes what optimizer.state_dict gave"
        )


def _problems(name: str, value: Any, like: torch.Tensor) -> list[str]:
    if value is None:
        return [f"nothing for {name}"]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(like.shape):
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        return [f"{shape} for {name}, which is {list(like.shape)}"]
    if isinstance(value, BoxedTensor) and not value.is_loaded:
        return [f"that nothing has been loaded into {name}"]
    if type(value) not in (torch.Tensor, torch.nn.Parameter, BoxedTensor):
        return [f"a {type(value).__name__} for {name} (give whole tensors, or load through step.state_dict())"]
    return []
