"""``optimizer.state_dict()`` and ``load_state_dict()``: whole states per parameter, out of and into buckets."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any, NoReturn

import torch

from zerofx.capture.checks import refuse_step
from zerofx.errors import UsageError
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.state import TrainingState


class _StatesElsewhere(defaultdict[torch.Tensor, Any]):
    """``optimizer.state`` while a step has the states. Who asks for one would find none; its copy is an empty table."""

    def __missing__(self, parameter: torch.Tensor) -> NoReturn:
        self._refuse(f"a look for those of a parameter of shape {list(parameter.shape)}")

    def __setitem__(self, parameter: torch.Tensor, _: Any) -> NoReturn:
        self._refuse(f"some put there for a parameter of shape {list(parameter.shape)}")

    def clear(self) -> NoReturn:
        self._refuse("them cleared")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"expected optimizer.state to be left alone while a step has the states in slices, found {what}: read them "
            f"by optimizer.state_dict() or step.full(name, state), set them by load_state_dict() (with "
            f"flatten_optimizer_state_dict=False where torch.distributed.checkpoint does it), or call step.close() "
            f"before what works on them (the eval() of a schedule-free optimizer, say), and compile after"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)


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
            optimizer.register_load_state_dict_post_hook(lambda _: self._note_loaded()),
            optimizer.register_step_pre_hook(refuse_step),
        ]
        self._elsewhere = _StatesElsewhere()
        if optimizer.state:
            self._absorb()
        self._empty()

    def give_back(self, *, alone: bool = False) -> None:
        """Leave every parameter's whole states in the optimizer, and let go of it; ``alone``: without other ranks.

        They are in the dtype that the optimizer computes with, so that its own ``step`` may follow.
        """
        for handle in self._handles:
            handle.remove()
        self.take_loaded()
        if alone:
            self._place_whole(as_computed=True)
        else:
            self._fill(as_computed=True)

    def _fill(self, *, as_computed: bool = False) -> None:
        """Put every parameter's whole states where ``state_dict`` looks for them. A collective call.

        They are in the dtype that they are stored in, or ``as_computed`` with.
        """
        purpose = "call optimizer.state_dict()"
        self._control.meet(purpose)
        with self._control.fail_together(purpose):
            self.take_loaded()
            self._state.flush()
            self._place_whole(as_computed=as_computed)

    def _place_whole(self, *, as_computed: bool) -> None:
        states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for bucket, state in zip(self._state.layout.buckets, self._state.buckets, strict=True):
            if not state.present:
                continue
            flat = {
                n: self._state.gather(bucket, self._state.load(t)) for n, t in state.flat.items() if n in state.present
            }
            if as_computed:
                flat = {n: whole.to(bucket.optimizer_dtype(whole.dtype)) for n, whole in flat.items()}
            for slot in bucket.slots:
                entry: dict[str, Any] = {n: _copy(v) for n, v in state.scalars.items() if n in state.present}
                parameter = self._state.parameter(slot.source)
                held = states[parameter] if slot.first_row else {}
                for name, whole in flat.items():
                    mine = self._state.to_parameter(slot, whole)
                    if slot.whole is None:
                        entry[name] = mine.clone()
                        continue
                    entry[name] = held[name] if name in held else mine.new_empty(parameter.shape)
                    slot.box(entry[name]).copy_(slot.view(whole))
                states[parameter] = entry
        self._optimizer.state = states

    def _empty(self) -> None:
        self._optimizer.state = self._elsewhere

    def _note_loaded(self) -> None:
        """Check what has been loaded; the ``load_state_dict`` of a subclass may still work on it, after torch's."""
        try:
            self._binding.find_states(self._state.parameters)
        except BaseException:
            self._empty()
            raise

    def take_loaded(self) -> None:
        """Take over what has been loaded since the last step, or put in the place of ``optimizer.state``."""
        if self._optimizer.state is not self._elsewhere:
            self._absorb()

    def _absorb(self) -> None:
        """Take over the states that the optimizer holds per parameter; parameters without any begin anew."""
        # What is under way for the states that go must not reach those that come.
        self._state.settle()
        try:
            held = self._binding.find_states(self._state.parameters)
        finally:
            self._empty()
        for index, mine in enumerate(self._state.buckets):
            if index not in held:
                mine.forget()
        for index, states in held.items():
            bucket, mine = self._state.layout.buckets[index], self._state.buckets[index]
            mine.scalars = {**mine.scalars, **{name: _copy(value) for name, value in states.scalars.items()}}
            for name, values in states.flat.items():
                whole = torch.zeros(bucket.numel, dtype=values[0].dtype.to_real(), device=self._state.device)
                for slot, value in zip(bucket.slots, values, strict=True):
                    slot.box_view(slot.view(whole)).copy_(slot.box(value))
                self._state.set_flat(bucket, name, self._state.slice(bucket, whole).clone())
            mine.present = states.present


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
