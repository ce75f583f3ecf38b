"""Buckets that a step reads, and does not train, of models which other open steps train: they come after its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import DEVICE
from zerofx.optimizers import UpdateProgram
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.state import TrainingState
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import Placement


@dataclass(frozen=True)
class Borrowed:
    """A model that another step has taken over: its state there, and the updates that its buckets have in that step.

    What lies on the device of it counts in the plan of the step that reads it, which copies there what does not.
    """

    lent: SharedModel
    state: TrainingState
    programs: Mapping[int, UpdateProgram]

    def check(self, mesh: Mesh) -> None:
        """Check that a step on ``mesh`` can read it.

        Raises:
            UsageError: it is on another mesh.
        """
        name, layout = self.lent.name, self.state.layout
        if mesh.pipe > 1 or layout.mesh.pipe > 1:
            raise UsageError(
                f"expected {name}, which another open step trains, to be read where every rank has all of its layers, "
                f"found a mesh with an axis 'pipe': compile both without"
            )
        if layout.mesh != mesh:
            raise UsageError(
                f"expected {name}, which another open step trains, on the mesh of the step that reads it, {mesh}, "
                f"found it on {layout.mesh}: compile both with the same mesh"
            )

    def placements(self) -> Mapping[str, Placement]:
        """Placements of its parameters on the model axis, by name in the step that reads it."""
        return {self.lent.full_name(name): placement for name, placement in self.state.layout.placements.items()}

    def facts(self) -> tuple[object, ...]:
        """The facts that a step which reads it depends on."""
        return tuple(
            (bucket, program and (program.states, program.tensor_scalars)) for bucket, program in self.buckets()
        )

    def buckets(self) -> Iterator[tuple[Bucket, UpdateProgram | None]]:
        """Its buckets as the step that reads it has them, each with the update whose states are on the device."""
        for bucket, state in zip(self.state.layout.buckets, self.state.buckets, strict=True):
            named = tuple(
                replace(slot, name=self.lent.full_name(slot.name), whole=slot.whole and self.lent.full_name(slot.whole))
                for slot in bucket.slots
            )
            lent = replace(
                bucket, name=self.lent.full_name(bucket.name), unit=self.lent.full_name(bucket.unit), group=None,
                slots=named,
                dtype=bucket.dtype if isinstance(state.master, torch.Tensor) else bucket.compute_dtype,
                lent_at=self.state.stage, lent_tier=None if state.tier == DEVICE else state.tier,
            )  # fmt: skip
            program = self.programs.get(bucket.index)
            yield lent, program if program is not None and _has_here(state, program) else None


def _has_here(state: BucketState, program: UpdateProgram) -> bool:
    """True if the states that an update works on are on the device."""
    return all(isinstance(state.flat.get(spec.name), torch.Tensor) for spec in program.states)


def add_borrowed(
    layout: BucketLayout, borrowed: Sequence[Borrowed], there: Collection[str] | None = None
) -> tuple[BucketLayout, dict[int, UpdateProgram]]:
    """A step's layout with the buckets that it reads of other steps, and what updates those there, by index.

    ``there``: the parameters that its graph has; buckets of others are left out. None for all.
    """
    pairs = [
        (bucket, program) for entry in borrowed for bucket, program in entry.buckets()
        if there is None or any(slot.name in there for slot in bucket.slots)
    ]  # fmt: skip
    first = len(layout.buckets)
    programs = {first + number: program for number, (_, program) in enumerate(pairs) if program is not None}
    return layout.append_lent(bucket for bucket, _ in pairs), programs


def own_part(
    layout: BucketLayout, programs: Mapping[int, UpdateProgram]
) -> tuple[BucketLayout, dict[int, UpdateProgram]]:
    """Of what ``add_borrowed`` gives, and a step's own updates with it, those of the step itself."""
    own = layout.own
    return own, {index: program for index, program in programs.items() if index < len(own.buckets)}
