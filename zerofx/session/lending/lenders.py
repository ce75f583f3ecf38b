"""The models of other open steps that a step's ``forward`` uses: found, watched, read where those steps have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.deferred import is_deferred
from zerofx.driver.lent import Borrowed
from zerofx.errors import UsageError
from zerofx.ir.buckets import BucketLayout, Slot
from zerofx.ir.casts import Casts, ComputeDtype
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.options import CompileOptions
from zerofx.runtime.state.arguments import Loans
from zerofx.runtime.state.state import TrainingState
from zerofx.session.lending.owners import LendingSteps, Owner, owner_of
from zerofx.session.life import Life


class Lenders:
    """The steps whose models one step's ``forward`` or ``loss_fn`` reaches, by what it calls them.

    Until such a step has taken its model over, parameters are read where the modules have them; from then on in its
    buckets, by steps that are captured anew.
    """

    def __init__(self, model: nn.Module, options: CompileOptions, life: Life) -> None:
        self._model, self._outside, self._life = model, options.objective.free_tensors, life
        self._compute_dtype = options.compute_dtype
        self._owners: dict[str, Owner] = {}
        self._agreed: set[str] = set()  # those whose values are known to be rank 0's

    def check(self) -> None:
        """Check that the steps whose models are read are open, before each use.

        Raises:
            UsageError: one of them is not.
        """
        for name in self._names:
            steps = self._owners[name].steps
            if steps is None or steps.life.closed or steps.life.failed:
                failed = "" if steps is None else steps.life.failed
                state = f"that it failed ({failed})" if failed else "it closed"
                raise UsageError(
                    f"expected the step that trains {name} to be open as long as this one reads {name}, found {state}: "
                    f"close it after this one; or close this one too, and compile its model again"
                )

    @property
    def key(self) -> str:
        """A text that says where what is read lies now: another one wherever it lies elsewhere."""
        return "\n".join(
            f"{name} {steps.num_given_back}: {'not prepared' if steps.taken is None else steps.taken.state.locations()}"
            for name, steps in self._used().items()
        )

    def find(self) -> None:
        """Look for models of other steps that a capture may read."""
        known = [name for name, _ in (*named_parameters(self._model), *named_buffers(self._model))]
        # What is used already keeps its name, though the way to it may be another now.
        owners = {name: owner for name, owner in self._owners.items() if name in self._names}
        for name, reached in self._outside.reachable():
            owner = owner_of(reached) if isinstance(reached, nn.Module | nn.Parameter) else None
            if owner is None or owner.steps is None or owner.steps.model is self._model or owner in owners.values():
                continue
            if reached is not owner.steps.model:  # a part of it, or a parameter
                name = type(owner.steps.model).__name__
            while any(other == name or other.startswith(f"{name}.") for other in (*known, *owners)):
                name = f"{name}'"
            owners[name] = owner
        self._owners = owners
        self._outside.offer(
            tuple(_to_shared_model(name, steps, self._compute_dtype, self._life) for name, steps in self._all.items())
        )

    @property
    def borrowed(self) -> tuple[Borrowed, ...]:
        """Those that a capture may read from buckets."""
        lent = {lender.name: lender for lender in self._outside.candidates}
        return tuple(
            Borrowed(lent[name], steps.taken.state, steps.taken.binding.latest_programs)
            for name, steps in self._all.items()
            if steps.taken is not None
        )

    def has_changed(self) -> bool:
        """True if a tensor that is used, and that no step trained, is trained by another step now."""
        return any(
            (owner := owner_of(tensor)) is not None and owner.steps is not None
            for tensor in self._outside.tensors().values()
        )

    def settle(self, agreed: Callable[[], object]) -> None:
        """Wait for delayed updates of other steps, and bring up those that are parked, once all ranks have ``agreed``
        to read the models. Collective at stages 1 and 2, and where one is parked.
        """
        for steps in self._used().values():
            waits = steps.options.delayed_update is not None
            if steps.taken is not None and (waits or steps.taken.is_parked):
                agreed()
                steps.taken.state.flush()

    def finish_updates(self) -> None:
        """Finish what other steps have let run on, before ranks agree to read the models."""
        for steps in self._used().values():
            if steps.tiers is not None:
                steps.tiers.finish_updates()

    @contextlib.contextmanager
    def lift_guards(self) -> Iterator[None]:
        """While open, the models may be captured."""
        with contextlib.ExitStack() as stack:
            for steps in self._all.values():
                stack.enter_context(steps.capturable())
            yield

    def agree(self, state: TrainingState) -> None:
        """Give all ranks rank 0's values of models that their own steps have not taken over yet. Collective.

        A step that takes its model over does the same.
        """
        for name, steps in self._used().items():
            if steps.taken is None and name not in self._agreed:
                with torch.no_grad():
                    for _, tensor in (*named_parameters(steps.model), *named_buffers(steps.model)):
                        state.broadcast(tensor)
                self._agreed.add(name)

    def read(self) -> Loans:
        """The tensors and states of the models that a step reads now."""
        lent = {lender.name: lender for lender in self._outside.lent}
        used = self._used()
        return Loans(
            tuple(lent.values()), tuple(steps.taken.state for steps in used.values() if steps.taken is not None)
        )

    def _used(self) -> Mapping[str, LendingSteps]:
        return {name: steps for name, steps in self._all.items() if name in self._names}

    @property
    def _names(self) -> list[str]:
        """The names of the models of which something is used."""
        return [lender.name for lender in self._outside.lent]

    @property
    def _all(self) -> Mapping[str, LendingSteps]:
        return {name: owner.steps for name, owner in self._owners.items() if owner.steps is not None}


def _to_shared_model(name: str, steps: LendingSteps, compute_dtype: torch.dtype | None, life: Life) -> SharedModel:
    """The model of another step, for one that computes in ``compute_dtype``."""
    taken, held_in = steps.taken, steps.options.casts(steps.model)
    what, refusal = f"{name}, which another open step trains", ""
    if steps.life.group is not life.group:
        refusal = (
            f"expected {what}, among the ranks of the step that reads it, found another process group: compile both "
            f"after the process group is made"
        )
    elif taken is None and (steps.options.weights is not None or is_deferred(steps.model)):
        refusal = (
            f"expected {what}, to have its values when it is read, found that they are made or loaded with the first "
            f"step of that: call its step.prepare(batch) before"
        )
    casts: ComputeDtype = compute_dtype
    if isinstance(held_in, Casts) and compute_dtype is not None:
        casts = replace(held_in, dtype=compute_dtype)  # what its own step keeps in float32 is so here too
    strides = {} if taken is None else taken.state.strides()
    slices = {} if taken is None else _slices(taken.layout)
    return SharedModel(name, steps.model, casts, held_in, strides, slices, taken is not None, refusal)


def _slices(layout: BucketLayout) -> dict[str, list[Slot]]:
    """The slices of each parameter that a step has in slices, in order, by its name."""
    slices: dict[str, list[Slot]] = {}
    slots = (slot for bucket in layout.buckets for slot in bucket.slots if slot.whole is not None)
    for slot in sorted(slots, key=lambda slot: slot.first_row):
        slices.setdefault(slot.source, []).append(slot)
    return slices
