"""The user's optimizer as the step sees it: its groups, its traced update, this step's scalars, its state dict.

The optimizer object stays the user's. Its ``param_groups`` are read at every step, so schedulers that change them just
work. Its states live in flat slices; ``optimizer.state_dict()`` gathers them on every rank, and
``optimizer.load_state_dict()`` divides what it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zerofx.buckets import Bucket, BucketLayout
from zerofx.checks import check_owner
from zerofx.errors import OptimizerError, UsageError
from zerofx.graph import ParameterInfo
from zerofx.optimizers import HostFunction, UpdateProgram, has_fused, scalar_state_names, trace_update
from zerofx.optimizers.shadow import structural_flags
from zerofx.runtime.control import Control
from zerofx.runtime.state import BucketState, TrainingState


def group_of_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: tuple[ParameterInfo, ...], with_gradient: set[str]
) -> dict[str, int]:
    """The index of the param group of each parameter that the step trains, by name.

    A parameter that is frozen, or that the loss does not depend on, is not trained, as in eager mode.

    Raises:
        OptimizerError: the optimizer holds a tensor that is not the model's, or lacks a parameter that gets a gradient.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    check_owner(model, optimizer)
    groups = {names[id(p)]: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [info.name for info in parameters if info.name in with_gradient and info.name not in groups]
    if missing:
        raise OptimizerError(
            f"expected every trainable parameter in the optimizer, found {len(missing)} that are not: "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. To train them, add them to a param group; "
            f"to leave them as they are, call requires_grad_(False) on them"
        )
    return {name: index for name, index in groups.items() if name in with_gradient}


@dataclass
class Advance:
    """One step's scalars by bucket, and the scalar states and state names that each bucket has after it."""

    values: dict[int, tuple[float, ...]]
    after: dict[int, tuple[dict[str, Any], frozenset[str]]]

    def swap(self, state: TrainingState, buckets: Iterable[int] | None = None) -> None:
        """Exchange what the buckets have with what is noted here: once to advance, a second time to go back."""
        for index in self.after if buckets is None else buckets:
            bucket = state.buckets[index]
            before = (bucket.scalars, bucket.present)
            bucket.scalars, bucket.present = self.after[index]
            self.after[index] = before


class OptimizerBinding:
    """Connects an optimizer to buckets. ``prefer_fused``: use torch's fused kernels where a group does not say."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, layout: BucketLayout, device: torch.device, prefer_fused: bool
    ) -> None:
        self.optimizer = optimizer
        self._layout = layout
        self._device = device
        self._prefer_fused = prefer_fused
        self._num_groups = len(optimizer.param_groups)
        self._programs: dict[int, UpdateProgram] = {}
        self._variant = ""
        self._hosts: dict[str, HostFunction] = {}

    def group(self, bucket: Bucket) -> dict[str, Any]:
        assert bucket.group is not None
        found: dict[str, Any] = self.optimizer.param_groups[bucket.group]
        return found

    @property
    def variant(self) -> str:
        """Tells the updates that hold now from others that the same optimizer can take; the same text on all ranks."""
        return self._variant

    def programs(
        self, state: TrainingState | None, held: Mapping[int, HeldState] = MappingProxyType({})
    ) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, for the options and states that hold now.

        ``held``: before there is a ``state``, what the optimizer holds itself, as the method ``held`` gives it.
        """
        traced: dict[Any, UpdateProgram] = {}
        for bucket in self._layout.buckets:
            if not bucket.trainable:
                continue
            scalars: dict[str, float] = {}
            present: frozenset[str] = frozenset()
            if state is not None:
                scalars = _scalar_values(state.buckets[bucket.index])
                present = frozenset(state.buckets[bucket.index].present)
            elif bucket.index in held:
                scalars = {name: float(value) for name, value in held[bucket.index].scalars.items()}
                present = held[bucket.index].present
            key = (bucket.group, bucket.dtype, present, tuple(scalars.items()))
            if key not in traced:
                traced[key] = trace_update(
                    self.optimizer,
                    self.group(bucket),
                    state_present=present,
                    scalar_values=scalars,
                    dtype=bucket.dtype,
                    fused=self._fused(bucket),
                )
            self._programs[bucket.index] = traced[key]
        texts = {id(program): _text(program) for program in traced.values()}
        whole = "\n".join(f"{index} {texts[id(program)]}" for index, program in sorted(self._programs.items()))
        groups = {bucket.group: self.group(bucket) for bucket in self._layout.buckets if bucket.trainable}
        flags = [", ".join(f"{name}={value}" for name, value in structural_flags(group)) for group in groups.values()]
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        self._variant = f"{type(self.optimizer).__name__}({'; '.join(flags)}), traced as {digest}"
        return dict(self._programs)

    def held(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, HeldState]:
        """The states that the optimizer holds per parameter, by bucket; ``parameters`` by name. Changes nothing.

        Raises:
            OptimizerError: parameters of one bucket have states that cannot be updated together.
        """
        found: dict[int, HeldState] = {}
        known: dict[Any, frozenset[str]] = {}
        for bucket in self._layout.buckets:
            entries = [self.optimizer.state.get(parameters[slot.source], {}) for slot in bucket.slots]
            if not bucket.trainable or not any(entries):
                continue
            key = (bucket.group, bucket.dtype)
            if key not in known:
                known[key] = scalar_state_names(
                    self.optimizer, self.group(bucket), dtype=bucket.dtype, fused=self._fused(bucket)
                )
            shapes = [tuple(parameters[slot.source].shape) for slot in bucket.slots]
            found[bucket.index] = _held_by_bucket(bucket, entries, shapes, known[key])
        return found

    def advance(self, state: TrainingState) -> Advance | None:
        """This step's scalars and what they leave behind; None when an update must be traced anew. Changes nothing.

        Raises:
            UsageError: param groups were added since compile.
        """
        if len(self.optimizer.param_groups) != self._num_groups:
            raise UsageError(
                f"expected the {self._num_groups} param groups that the optimizer had at compile, found "
                f"{len(self.optimizer.param_groups)}: call step.close() before add_param_group, and compile again "
                f"after it"
            )
        found = Advance({}, {})
        for index, program in self._programs.items():
            bucket = state.buckets[index]
            if bucket.present != program.state_before:
                return None
            trial = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in bucket.scalars.items()}
            values = self._host(program)(self.group(self._layout.buckets[index]), trial)
            if values is None:
                return None
            found.values[index], found.after[index] = values, (trial, program.state_after)
        return found

    def _host(self, program: UpdateProgram) -> HostFunction:
        if program.host_source not in self._hosts:
            self._hosts[program.host_source] = program.host()
        return self._hosts[program.host_source]

    def _fused(self, bucket: Bucket) -> bool:
        asked = self.group(bucket).get("fused")
        if asked is None and not self._prefer_fused:
            return False
        # Of states that live on the host, the update may run there.
        places = {self._device.type, "cpu"}
        return asked is not False and all(has_fused(self.optimizer, place, bucket.dtype) for place in places)


def _scalar_values(state: BucketState) -> dict[str, float]:
    return {name: float(value) for name, value in state.scalars.items() if name in state.present}


class OptimizerState:
    """Keeps ``optimizer.state_dict()`` and ``load_state_dict()`` truthful through torch's own hooks."""

    def __init__(self, binding: OptimizerBinding, state: TrainingState, control: Control) -> None:
        optimizer = binding.optimizer
        self._optimizer = optimizer
        self._binding = binding
        self._state = state
        self._control = control
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._fill()),
            optimizer.register_state_dict_post_hook(lambda *_: self._empty()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._absorb()),
            optimizer.register_step_pre_hook(_refuse_step),
        ]
        if optimizer.state:
            self._absorb()

    def give_back(self) -> None:
        """Leave every parameter's whole states in the optimizer, and let go of it."""
        for handle in self._handles:
            handle.remove()
        self._fill()

    def _fill(self) -> None:
        """Put every parameter's whole states where ``state_dict`` looks for them. A collective call."""
        self._control.meet("call optimizer.state_dict()")
        self._state.flush()
        for bucket, state in zip(self._state.layout.buckets, self._state.buckets, strict=True):
            if not bucket.trainable or not state.present:
                continue
            flat = {
                n: self._state.gather(bucket, self._state.load(t)) for n, t in state.flat.items() if n in state.present
            }
            for slot in bucket.slots:
                entry: dict[str, Any] = {
                    n: v.clone() if isinstance(v, torch.Tensor) else v
                    for n, v in state.scalars.items()
                    if n in state.present
                }
                parameter = self._state.parameter(slot.source)
                held = self._optimizer.state.get(parameter, {}) if slot.first_row else {}
                for name, whole in flat.items():
                    mine = slot.view(whole)
                    if slot.whole is None:
                        entry[name] = mine.clone()
                        continue
                    entry[name] = held[name] if name in held else mine.new_empty(parameter.shape)
                    slot.box(entry[name]).copy_(mine)
                self._optimizer.state[parameter] = entry

    def _empty(self) -> None:
        self._optimizer.state.clear()

    def _absorb(self) -> None:
        """Take over the states that the optimizer holds per parameter; parameters without any begin anew."""
        # What is under way for the states that go must not reach those that come.
        self._state.settle()
        try:
            held = self._binding.held(self._state.parameters)
        finally:
            self._optimizer.state.clear()
        for index, mine in enumerate(self._state.buckets):
            if index not in held:
                mine.forget()
        for index, states in held.items():
            bucket, mine = self._state.layout.buckets[index], self._state.buckets[index]
            for name, value in states.scalars.items():
                mine.scalars[name] = value.clone() if isinstance(value, torch.Tensor) else value
            for name, values in states.flat.items():
                whole = torch.zeros(bucket.numel, dtype=values[0].dtype, device=self._state.device)
                for slot, value in zip(bucket.slots, values, strict=True):
                    slot.view(whole).copy_(slot.box(value))
                self._state.set_flat(bucket, name, self._state.slice(whole).clone())
            mine.present = states.present


@dataclass(frozen=True)
class HeldState:
    """What an optimizer holds for the parameters of one bucket: scalars that they share, and a tensor of each.

    Of a parameter in slices it is the whole tensor, for each slice's bucket.
    """

    scalars: dict[str, Any]
    flat: dict[str, list[torch.Tensor]]

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self.scalars) | frozenset(self.flat)


def _held_by_bucket(
    bucket: Bucket, entries: list[Mapping[str, Any]], shapes: list[tuple[int, ...]], scalars: frozenset[str]
) -> HeldState:
    """``shapes`` are those of the model's parameters, of which the bucket may hold slices; ``scalars`` are states that
    the parameters share."""
    held = HeldState({}, {})
    for name in dict.fromkeys(name for entry in entries for name in entry):
        values = [entry.get(name) for entry in entries]
        there = [value for value in values if value is not None]
        if not there:
            continue  # no state at all: SGD without momentum keeps momentum_buffer=None
        if len(there) < len(values):
            without = [s.source for s, value in zip(bucket.slots, values, strict=True) if value is None]
            raise OptimizerError(
                f"expected state {name!r} for every parameter of {bucket.name}, found none for {without}: parameters "
                f"that are updated together must have been trained together; load a state of this very model"
            )
        if name in scalars:
            _check_shapes(bucket, name, values, None)
            if len({float(value) for value in there}) > 1:
                raise OptimizerError(
                    f"expected one value of {name!r} for all parameters of {bucket.name}, found "
                    f"{sorted({float(value) for value in there})}: they are updated together"
                )
            held.scalars[name] = values[0]
            continue
        _check_shapes(bucket, name, values, shapes)
        held.flat[name] = [value for value in values if isinstance(value, torch.Tensor)]
    return held


def _check_shapes(bucket: Bucket, name: str, values: list[Any], shapes: list[tuple[int, ...]] | None) -> None:
    """Refuse a state whose values have not these shapes; without ``shapes`` it is a number, of which each has one."""
    for index, (slot, value) in enumerate(zip(bucket.slots, values, strict=True)):
        expected = shapes[index] if shapes is not None else ()
        if tuple(value.shape) != expected if isinstance(value, torch.Tensor) else shapes is not None:
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise OptimizerError(
                f"expected state {name!r} of {slot.source} to have shape {list(expected)}, found {found}: load a state "
                f"of this very model"
            )


def _text(program: UpdateProgram) -> str:
    """What ``program.key`` says, as text that is the same in every process."""
    parts = (program.optimizer, program.dtype, program.fused, program.first_step_only, sorted(program.state_before))
    return "\n".join(map(str, (*parts, program.states, program.scalar_states, program.host_source, program.graph)))


def _refuse_step(*_: Any) -> None:
    raise UsageError(
        "expected no call of optimizer.step(): step(batch) has already updated the parameters; remove the call (and "
        "loss.backward())"
    )
