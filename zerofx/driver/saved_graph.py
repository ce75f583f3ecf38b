"""A step's graph in a file, for ``zerofx opt``: the graph, as far as it is rewritten, and what its passes are given.

The file is JSON: no code, and no values but those of short constants. It has no host functions of the optimizer, so
nothing can be run from it, and not what the user's model returns besides its loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from zerofx.disk.cache import MALFORMED
from zerofx.disk.own_files import read_named, write_named
from zerofx.driver.captures import Captures
from zerofx.errors import UsageError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import placeholder, plain_facts, set_placeholder, set_plain_facts, set_task, task_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.serialise import (
    NAMESPACES,
    NotStorableError,
    decode,
    decode_nodes,
    encode,
    encode_nodes,
    from_json,
    to_json,
)
from zerofx.ir.tensor_parts import named_parameters
from zerofx.optimizers import Optimizers, UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.optimizers.program import StateSpec
from zerofx.runtime.state.parameter_groups import group_of_parameters
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.torch_private.capture import fake_mode

_FORMAT = 1


@dataclass(frozen=True)
class SavedGraph:
    """A step's graph, and what passes are given besides a plan.

    ``groups`` and ``programs`` are the param group and the update of each trained parameter, by its name; ``divided``
    are the batch tensors that micro-batches divide. ``layout`` is there once passes of a plan have been on the graph.
    """

    step: StepGraph
    groups: Mapping[str, int]
    programs: Mapping[str, UpdateProgram]
    divided: frozenset[str]
    layout: BucketLayout | None = None

    @staticmethod
    def of(model: nn.Module, optimizers: Optimizers, captures: Captures, num: int, *, prefer_fused: bool) -> SavedGraph:
        """The graph that ``captures`` prepares for ``num`` micro-batches, as it was captured.

        ``prefer_fused`` as for ``OptimizerBinding``.

        Raises:
            ZeroFXError: the model cannot be captured, or an optimizer is not the model's.
        """
        step = captures.capture_one(num)
        step.guarded = captures.guarded
        groups = group_of_parameters(model, optimizers, step.parameters, set(step.gradients))
        layout = layout_of(step, groups, Mesh())
        binding = OptimizerBinding(optimizers, layout, step.device, prefer_fused=prefer_fused)
        programs = binding.programs(None, binding.find_states(dict(named_parameters(model))))
        update_of = {slot.name: program for index, program in programs.items() for slot in layout.buckets[index].slots}
        try:
            divided = captures.batch_names_to_divide(
                2
            )  # whatever ``num`` is: how many there are to be may still be asked
        except UsageError:
            divided = frozenset()  # a batch that no micro-batches divide
        return SavedGraph(step, groups, update_of, divided)

    def save(self, path: str | Path) -> None:
        """Write the file; one that exists is replaced.

        Raises:
            UsageError: the graph has what no file can have, such as operators that are not torch's.
        """
        try:
            text = self._text()
        except NotStorableError as error:
            raise UsageError(
                f"expected a graph of torch's own operators, with constants of a few elements, to save in {path}, "
                f"found {error}"
            ) from error
        write_named(path, text)

    @staticmethod
    def load(path: str | Path) -> SavedGraph:
        """Read a file that ``save`` has written.

        Raises:
            UsageError: there is no such file, or it has no graph.
        """
        try:
            return _read(read_named(path))
        except (OSError, *MALFORMED) as error:
            raise UsageError(
                f"expected a graph in the file {path}, found none ({type(error).__name__}: {error}): save one with "
                f"`zerofx plan MODULE:FUNCTION --save-graph FILE`"
            ) from error

    def _text(self) -> str:
        step, places = self.step, {node: place for place, node in enumerate(self.step.graph.nodes)}
        programs = list({id(program): program for program in self.programs.values()}.values())
        place_of = {id(program): place for place, program in enumerate(programs)}
        return json.dumps({
            "format": _FORMAT,
            "graph": json.loads(to_json(step, NAMESPACES)),
            "facts": [encode(_facts(node)) for node in places],
            "step": {name: encode(getattr(step, name), places) for name in _OF_STEP},
            "groups": dict(self.groups),
            "programs": [_program_data(program) for program in programs],
            "program_of": {name: place_of[id(program)] for name, program in self.programs.items()},
            "divided": sorted(self.divided),
            "layout": encode(self.layout),
        })  # fmt: skip


# Fields of a step's graph that the graph's own text leaves to the model.
_OF_STEP = (
    "parameters", "units", "num_micro_batches", "by_layer", "slices", "cut_pieces", "reduced", "layer_squares",
    "kept_gradients", "clipping", "unscaling", "guarded",
)  # fmt: skip


def _read(text: str) -> SavedGraph:
    data = json.loads(text)
    if isinstance(data.get("graph"), str):
        raise ValueError("it is a plan, not a graph")
    if data["format"] != _FORMAT or not isinstance(data.get("graph"), dict):
        raise ValueError("it was written by another version of zerofx, or is no graph")
    blank = StepGraph(fx.Graph(), torch.device("cpu"), decode(data["step"]["parameters"]))
    step = from_json(json.dumps(data["graph"]), blank, fake_mode(), NAMESPACES)
    nodes = list(step.graph.nodes)
    for node, facts in zip(nodes, data["facts"], strict=True):
        plain, task, given = decode(facts)
        set_plain_facts(node, plain)
        if task is not None:
            set_task(node, task)
        if given is not None:
            set_placeholder(node, given)
    step = replace(step, **{name: decode(data["step"][name], nodes) for name in _OF_STEP})
    programs = [_program(nodes, values) for nodes, values in data["programs"]]
    program_of = {name: programs[place] for name, place in data["program_of"].items()}
    return SavedGraph(step, data["groups"], program_of, frozenset(data["divided"]), decode(data["layout"]))


def _facts(node: fx.Node) -> tuple[Any, ...]:
    """Facts of a node that the graph's own text leaves out."""
    return plain_facts(node), task_of(node), placeholder(node) if node.op == "placeholder" else None


def _program_data(program: UpdateProgram) -> list[Any]:
    """The graph of an update, and its other fields."""
    values = {each.name: getattr(program, each.name) for each in fields(program)} | {"graph": None}
    for name, kind in _SPECS.items():
        values[name] = tuple(tuple(getattr(spec, field.name) for field in fields(kind)) for spec in values[name])
    return [encode_nodes(program.graph, NAMESPACES), encode(values)]


def _program(nodes: list[list[Any]], data: Any) -> UpdateProgram:
    values = decode(data)
    specs = {name: tuple(kind(*spec) for spec in values[name]) for name, kind in _SPECS.items()}
    return UpdateProgram(**{**values, **specs, "graph": decode_nodes(nodes, NAMESPACES)[0].graph})


_SPECS: Mapping[str, type[Any]] = {"states": StateSpec, "tensor_scalars": StateSpec}
