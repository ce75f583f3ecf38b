"""The user's optimizer as the step sees it: its groups, its traced update, this step's scalars, its state dict.

The optimizer object stays the user's. Its ``param_groups`` are read at every step, so schedulers that change them just
work. Its states live in flat slices; ``optimizer.state_dict()`` gathers them on every rank, and
``optimizer.load_state_dict()`` divides what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofx.buckets import Bucket, BucketLayout
from zerofx.errors import OptimizerError, UsageError
from zerofx.graph import ParameterInfo
from zerofx.optimizers import HostFunction, UpdateProgram, has_fused, trace_update
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
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise OptimizerError(
                    f"expected an optimizer over the model's parameters, found a tensor of shape {list(parameter.shape)} "
                    f"in param group {index} (number {position}) that is not one: build the optimizer from "
                    f"model.parameters() of the model given to compile"
                )
            groups[names[id(parameter)]] = index
    missing = [info.name for info in parameters if info.name in with_gradient and info.name not in groups]
    if missing:
        raise OptimizerError(
            f"expected every trainable parameter in the optimizer, found {len(missing)} that are not: "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. To train them, add them to a param group; to "
            f"leave them as they are, call requires_grad_(False) on them"
        )
    return {name: index for name, index in groups.items() if name in with_gradient}


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
        self._hosts: dict[str, HostFunction] = {}

    def group(self, bucket: Bucket) -> dict[str, Any]:
        assert bucket.group is not None
        found: dict[str, Any] = self.optimizer.param_groups[bucket.group]
        return found

    def programs(self, state: TrainingState | None) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, for the options and states that hold now."""
        traced: dict[Any, UpdateProgram] = {}
        for bucket in self._layout.buckets:
            if not bucket.trainable:
                continue
            scalars = _scalar_values(state.buckets[bucket.index]) if state is not None else {}
            present = frozenset(state.buckets[bucket.index].present) if state is not None else frozenset()
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
        return dict(self._programs)

    def scalars(self, state: TrainingState) -> dict[int, tuple[float, ...]] | None:
        """This step's scalars by bucket; None when an update must be traced anew. Advances the scalar states.

        Raises:
            UsageError: param groups were added since compile.
        """
        if len(self.optimizer.param_groups) != self._num_groups:
            raise UsageError(
                f"expected the {self._num_groups} param groups that the optimizer had at compile, found "
                f"{len(self.optimizer.param_groups)}: compile a step after the last add_param_group"
            )
        found: dict[int, tuple[float, ...]] = {}
        advanced: dict[int, dict[str, Any]] = {}
        for index, program in self._programs.items():
            bucket = state.buckets[index]
            if bucket.present != program.state_before:
                return None
            trial = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in bucket.scalars.items()}
            values = self._host(program)(self.group(self._layout.buckets[index]), trial)
            if values is None:
                return None
            found[index], advanced[index] = values, trial
        for index, trial in advanced.items():
            bucket = state.buckets[index]
            for name, value in trial.items():
                if isinstance(value, torch.Tensor) and isinstance(bucket.scalars.get(name), torch.Tensor):
                    bucket.scalars[name].copy_(value)
                else:
                    bucket.scalars[name] = value
            bucket.present = self._programs[index].state_after
        return found

    def _host(self, program: UpdateProgram) -> HostFunction:
        if program.host_source not in self._hosts:
            self._hosts[program.host_source] = program.host()
        return self._hosts[program.host_source]

    def _fused(self, bucket: Bucket) -> bool:
        asked = self.group(bucket).get("fused")
        if asked is None and not self._prefer_fused:
            return False
        return asked is not False and has_fused(self.optimizer, self._device.type)


def _scalar_values(state: BucketState) -> dict[str, float]:
    return {name: float(value) for name, value in state.scalars.items() if name in state.present}


class OptimizerState:
    """Keeps ``optimizer.state_dict()`` and ``load_state_dict()`` truthful through torch's own hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: TrainingState, control: Control) -> None:
        self._optimizer = optimizer
        self._state = state
        self._control = control
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._fill()),
            optimizer.register_state_dict_post_hook(lambda *_: self._empty()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._absorb()),
            optimizer.register_step_pre_hook(_refuse_step),
        ]
        self._absorb()

    def give_back(self) -> None:
        """Leave every parameter's whole states in the optimizer, and let go of it."""
        for handle in self._handles:
            handle.remove()
        self._fill()

    def _fill(self) -> None:
        """Put every parameter's whole states where ``state_dict`` looks for them. A collective call."""
        self._control.meet("call optimizer.state_dict()")
        for bucket, state in zip(self._state.layout.buckets, self._state.buckets, strict=True):
            if not bucket.trainable or not state.present:
                continue
            flat = {n: self._state.gather(bucket, t) for n, t in state.flat.items() if n in state.present}
            for slot in bucket.slots:
                entry: dict[str, Any] = {
                    n: v.clone() if isinstance(v, torch.Tensor) else v
                    for n, v in state.scalars.items()
                    if n in state.present
                }
                entry |= {name: slot.view(whole).clone() for name, whole in flat.items()}
                self._optimizer.state[self._state.parameter(slot.name)] = entry

    def _empty(self) -> None:
        self._optimizer.state.clear()

    def _absorb(self) -> None:
        """Take over the states that the optimizer holds per parameter, if any."""
        if not self._optimizer.state:
            return
        for bucket, state in zip(self._state.layout.buckets, self._state.buckets, strict=True):
            entries = [self._optimizer.state.get(self._state.parameter(slot.name), {}) for slot in bucket.slots]
            if bucket.trainable and any(entries):
                _divide_states(self._state, bucket, state, entries)
        self._optimizer.state.clear()


def _divide_states(
    owner: TrainingState, bucket: Bucket, state: BucketState, entries: list[Mapping[str, Any]]
) -> None:
    names = {name for entry in entries for name in entry}
    for name in sorted(names):
        values = [entry.get(name) for entry in entries]
        if any(value is None for value in values):
            without = [s.name for s, value in zip(bucket.slots, values, strict=True) if value is None]
            raise OptimizerError(
                f"expected state {name!r} for every parameter of {bucket.name}, found none for {without}: parameters "
                f"that are updated together must have been trained together; load a state of this very model"
            )
        if all(_is_scalar(value, slot.shape) for value, slot in zip(values, bucket.slots, strict=True)):
            if len({float(value) for value in values}) > 1:  # type: ignore[arg-type]  # not None, see above
                raise OptimizerError(
                    f"expected one value of {name!r} for all parameters of {bucket.name}, found "
                    f"{sorted({float(v) for v in values})}: they are updated together"  # type: ignore[arg-type]
                )
            first = values[0]
            state.scalars[name] = first.clone() if isinstance(first, torch.Tensor) else first
            continue
        like = next(value for value in values if isinstance(value, torch.Tensor))
        whole = torch.zeros(bucket.numel, dtype=like.dtype, device=state.stored.device)
        for slot, value in zip(bucket.slots, values, strict=True):
            slot.view(whole).copy_(value)  # type: ignore[arg-type]  # a tensor of the slot's shape
        state.flat[name] = owner.slice(whole).clone()
    state.present = frozenset(names)


def _is_scalar(value: Any, shape: tuple[int, ...]) -> bool:
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and shape != ())


def _refuse_step(*_: Any) -> None:
    raise UsageError(
        "expected no call of optimizer.step(): step(batch) has already updated the parameters; remove the call (and "
        "loss.backward())"
    )
