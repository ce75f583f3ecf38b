"""The place of one tensor of a step, whole: a parameter, a state of it, or its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zerofx.errors import UsageError
from zerofx.ir.batch import hash_of
from zerofx.ir.buckets import Bucket, Slot
from zerofx.ir.tensor_parts import named_parameters
from zerofx.optimizers.program import WHOLE_STATES
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.state import TrainingState
from zerofx.session.life import Life
from zerofx.session.taken_over import TakenOver
from zerofx.units import first_few

GRADIENT = "grad"  # of a parameter, where a state of it may be named


@contextmanager
def show_tensor(taken: TakenOver, life: Life, place: Place, *, write_back: bool) -> Iterator[torch.Tensor]:
    """A copy of what is in a place, of the parameter's shape; with ``write_back`` it is taken over after.

    Collective. Where the block raises, nothing is written.

    Raises:
        RankMismatchError: ranks ask for others, or write other values.
    """
    purpose, control = f"read {place.described}", life.control
    with life.claim(purpose):
        control.meet(purpose)
        with control.fail_together(purpose), torch.no_grad():
            taken.optimizer_state.take_loaded()
            taken.state.flush()
            value = place.read(control)
    yield value
    if write_back:
        purpose = f"write {place.described}"
        with life.claim(purpose):
            place.check(value)
            control.agree(
                purpose, hash_of(value), f"values of {place.described}",
                "Give every rank the same, for example by torch.distributed.broadcast.",
            )  # fmt: skip
            with control.fail_together(purpose), torch.no_grad():
                place.write(value)


def find_place(
    taken: TakenOver, life: Life, name: str, state_name: str | None, gradients: Mapping[int, torch.Tensor]
) -> Place:
    """The place of what is asked for; what the stage that has it does not find, all ranks raise. Collective in stages.

    Raises:
        UsageError: as ``Place.of``.
    """
    if taken.layout.mesh.pipe == 1:
        return Place.of(taken, name, state_name, gradients)
    purpose, outcome = f"read {state_name or 'values'} of {name}", list[Place | UsageError]()
    try:
        outcome.append(Place.of(taken, name, state_name, gradients))
    except UsageError as error:
        outcome.append(error)
    (place,) = outcome
    with life.claim(purpose):
        for failure in life.control.gather(place if isinstance(place, UsageError) else None, purpose):
            if failure is not None:
                raise failure
    assert isinstance(place, Place), "what has failed is raised"
    return place


@dataclass(frozen=True)
class Place:
    """The place of a parameter, or of its state ``state_name``: in one bucket, or in slices in several; in no bucket
    here where another stage has it.

    ``gradients``: what this rank has of those of buckets, for a gradient; empty for all else.
    """

    state: TrainingState
    parameter: torch.Tensor
    slots: Sequence[tuple[Bucket, Slot]]
    state_name: str | None
    described: str
    gradients: Mapping[int, torch.Tensor]

    @staticmethod
    def of(taken: TakenOver, name: str, state_name: str | None, gradients: Mapping[int, torch.Tensor]) -> Place:
        """Raises:
        UsageError: there is nothing of that name; lists what there is.
        """
        state = taken.state
        by_any_name = dict(named_parameters(taken.model, remove_duplicate=False))
        parameter = by_any_name.get(name)
        if parameter is None:
            near = [other for other in by_any_name if other.rpartition(".")[2] == str(name).rpartition(".")[2]]
            raise UsageError(
                f"expected the name of a parameter, found {name!r}: there are "
                f"{first_few(near or list(by_any_name)) or 'none'}; buffers are on the model, whole"
            )
        slots = [(bucket, slot) for bucket, _, slot in state.slots() if state.parameter(slot.source) is parameter]
        described = name if state_name is None else f"{state_name} of {name}"
        if not slots:
            return Place(state, parameter, (), state_name, described, {})
        if state_name == GRADIENT:
            if not all(bucket.index in gradients for bucket, _ in slots):
                raise UsageError(
                    f"expected a gradient that the step that ran last has kept, found {described}, which it has not: "
                    f"give zerofx.compile keep_gradients=({name!r},), and run a step that trains the parameter and is "
                    f"not left out"
                )
            return Place(state, parameter, slots, state_name, described, gradients)
        if state_name is not None:
            held = state.buckets[slots[0][0].index]
            there = sorted((held.present & held.flat.keys()) - {WHOLE_STATES})
            if state_name not in there:
                raise UsageError(
                    f"expected a state that the optimizer has of {name}, found {state_name!r}: there are "
                    f"{first_few(there) or 'none before its first step'}; numbers that parameters share are in "
                    f"optimizer.state_dict(), and gradients are 'grad'"
                )
        return Place(state, parameter, slots, state_name, described, {})

    def read(self, control: Control) -> torch.Tensor:
        """The whole tensor, on the device, as a copy. Collective."""
        value, mesh = self._read_own(), self.state.layout.mesh
        if mesh.pipe > 1:
            of_ranks = control.gather(None if value is None else value.dtype, f"read {self.described}")
            first, dtype = next((rank, dtype) for rank, dtype in enumerate(of_ranks) if dtype is not None)
            value = self.parameter.new_empty(self.parameter.shape, dtype=dtype) if value is None else value
            self.state.give_to_stages(value, mesh.place(first, "pipe"))
        assert value is not None, "a parameter lies in some bucket"
        return value

    def _read_own(self) -> torch.Tensor | None:
        """The part of it that this rank's stage has, whole; None for nothing. Collective there."""
        value: torch.Tensor | None = None
        for bucket, slot in self.slots:
            flat = self._flat(bucket)
            if slot.whole is None:
                return self.state.to_parameter(slot, flat).clone()
            if value is None:
                value = flat.new_empty(self.parameter.shape)
            slot.box(value).copy_(slot.view(flat))
        return value

    def write(self, value: torch.Tensor) -> None:
        """Take ``value`` over. Collective."""
        for bucket, slot in self.slots:
            flat = self._flat(bucket).clone()
            slot.box_view(slot.view(flat)).copy_(slot.box(value))
            if self.state_name is None:
                self.state.write_bucket(bucket, flat)
            else:
                self.state.set_flat(bucket, self.state_name, self.state.slice(bucket, flat).clone())

    def check(self, value: torch.Tensor) -> None:
        """Raises:
        UsageError: the tensor has been made another.
        """
        if value.shape != self.parameter.shape:
            raise UsageError(
                f"expected {self.described} to be of shape {list(self.parameter.shape)} at the end of the block, found "
                f"{list(value.shape)}: change its values in place"
            )

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's values, whole, as they are stored."""
        if self.gradients:
            return self.state.gather(bucket, self.gradients[bucket.index])
        if self.state_name is None:
            return self.state.gather(bucket, self.state.load_stored(bucket))
        return self.state.gather(bucket, self.state.load(self.state.buckets[bucket.index].flat[self.state_name]))
