"""A step as text: all that is needed to load and run a lowered step, for an equal step of a later run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from zerofx.codegen.arena import Take
from zerofx.codegen.emit import EmittedStep
from zerofx.codegen.region_facts import RegionFacts
from zerofx.codegen.step_file_data import step_file_of, to_data
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.returned import Returned
from zerofx.ir.serialise import decode, decode_constant, encode, encode_constant
from zerofx.lowering.load import StepProgram
from zerofx.runtime.state.arguments import StepArguments
from zerofx.scheduler.cost.liveness import MemoryEvent
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import RegionMemory
from zerofx.torch_private.capture import fake_mode


@dataclass(frozen=True)
class KeptStep:
    """A step that an earlier run has built.

    ``program`` has the plan with the predictions for the compiled regions, which hold ``memory``. Its source is kept as
    data. ``plan_text`` and ``decisions_hash`` are the plan's.
    ``gradients`` names the parameters of the captured graph that have one. ``variant`` is the optimizer's update
    (``OptimizerBinding.variant``). ``measured`` is the known memory of regions when the step was planned, from earlier
    plans that did not fit. ``takes``: the places of its allocations in its arena.
    """

    program: StepProgram
    plan_text: str
    decisions_hash: str
    layout: BucketLayout
    gradients: tuple[str, ...]
    variant: str
    memory: RegionMemory
    measured: RegionMemory
    takes: tuple[Take, ...]

    def set_returned(self, returned: Returned) -> KeptStep:
        """A copy with the output structure, which holds user classes and cannot be serialised.

        The text says which of it is returned as it is.
        """
        returned = replace(returned, whole=self.program.returned.whole)
        return replace(self, program=replace(self.program, returned=returned))

    def digest(self) -> str:
        """A hash that is equal on ranks that run the same step."""
        file = json.dumps(to_data(self.program.emitted.file))
        parts = (self.decisions_hash, repr(self.layout), self.variant, file)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """The step as text.

        Raises:
            NotStorableError: a part of it cannot be written as text.
        """
        program = self.program
        return json.dumps({
            "plan": self.plan_text,
            "decisions_hash": self.decisions_hash,
            "layout": encode(self.layout),
            "gradients": self.gradients,
            "variant": self.variant,
            "memory": _memory_data(self.memory),
            "measured": _memory_data(self.measured),
            "takes": self.takes,
            "file": to_data(program.emitted.file),
            "placeholders": encode(dict(program.arguments.placeholders)),
            "constants": {name: encode_constant(constant) for name, constant in program.arguments.constants.items()},
            "num_micro_batches": program.arguments.num_micro_batches,
            "regions": [
                [region.key, encode(region.inputs), region.num_nodes, region.num_outputs, region.is_update,
                 region.on_host, sorted(region.dying)]
                for region in program.regions
            ],
            "num_regions": program.num_regions,
            "whole": sorted(program.returned.whole),
            "device": str(program.device),
        })  # fmt: skip

    @staticmethod
    def from_json(text: str) -> KeptStep:
        """The step that ``to_json`` has written.

        Raises:
            Exception: one of ``zerofx.disk.cache.MALFORMED``: ``to_json`` has not written the text.
        """
        data = json.loads(text)
        with fake_mode():
            file = step_file_of(data["file"])
            regions = tuple(
                RegionFacts(key, decode(inputs), num_nodes, num_outputs, is_update, on_host, frozenset(dying))
                for key, inputs, num_nodes, num_outputs, is_update, on_host, dying in data["regions"]
            )
        arguments = StepArguments(
            decode(data["placeholders"]),
            {name: decode_constant(*constant) for name, constant in data["constants"].items()},
            data["num_micro_batches"],
        )
        return KeptStep(
            StepProgram(
                Plan.from_json(data["plan"]), EmittedStep(file.text, file), arguments, regions,
                data["num_regions"], torch.device(data["device"]), Returned(whole=frozenset(data["whole"])),
            ),
            data["plan"], data["decisions_hash"], decode(data["layout"]),
            tuple(data["gradients"]), data["variant"], _memory(data["memory"]), _memory(data["measured"]),
            tuple(None if place is None else (int(place[0]), int(place[1])) for place in data["takes"]),
        )  # fmt: skip


def _memory_data(memory: RegionMemory) -> dict[str, list[tuple[int | None, ...]]]:
    return {key: [astuple(event) for event in events] for key, events in memory.items()}


def _memory(data: Mapping[str, list[list[Any]]]) -> RegionMemory:
    return {key: tuple(MemoryEvent(*event) for event in events) for key, events in data.items()}
