"""A step's graph in a file, for ``zerofx opt``: the graph, as far as it is rewritten, and what its passes are given.

The file is JSON: no code, and no values but those of short constants. It has no host functions of the optimizer, so
nothing can be run from it, and not what the user's model returns besides its loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn

from zerofx.disk.cache import MALFORMED
from zerofx.disk.own_files import read_named, write_named
from zerofx.driver.captures import Captures
from zerofx.driver.kept.step import layout_data, read_layout
from zerofx.errors import UsageError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import (
    Job,
    Placeholder,
    Role,
    Task,
    placeholder,
    plain_facts,
    set_placeholder,
    set_plain_facts,
    set_task,
    task_of,
)
from zerofx.ir.graph import Clipping, StepGraph, Unscaling
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.serialise import (
    NAMESPACES,
    NotStorableError,
    decoded,
    decoded_nodes,
    encoded,
    encoded_nodes,
    from_json,
    to_json,
)
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.program import ScalarStateSpec, StateSpec
from zerofx.runtime.state.optimizer import OptimizerBinding
from zerofx.runtime.state.parameter_groups import group_of_parameters
from zerofx.scheduler.plan.decisions import SliceDecision
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.torch_private.capture import fake_mode

T = TypeVar("T")

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
    def of(
        model: nn.Module, optimizer: torch.optim.Optimizer, captures: Captures, num: int, *, prefer_fused: bool
    ) -> SavedGraph:
        """The graph that ``captures`` prepares for ``num`` micro-batches, as it was captured.

        ``prefer_fused`` as for ``OptimizerBinding``.

        Raises:
            ZeroFXError: the model cannot be captured, or the optimizer is not the model's.
        """
        step = captures.as_captured(num)
        step.guarded = captures.guarded
        groups = group_of_parameters(model, optimizer, step.parameters, set(step.gradients))
        layout = layout_of(step, groups, Mesh())
        binding = OptimizerBinding(optimizer, layout, step.device, prefer_fused=prefer_fused)
        programs = binding.programs(None, binding.held(dict(model.named_parameters())))
        update_of = {slot.name: program for index, program in programs.items() for slot in layout.buckets[index].slots}
        try:
            divided = captures.divided(2)  # whatever ``num`` is: how many there are to be may still be asked
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
        step, layout = self.step, self.layout
        programs = list({id(other_program): other_program for other_program in self.programs.values()}.values())
        place = {id(program): number for number, program in enumerate(programs)}
        return json.dumps({
            "format": _FORMAT,
            "graph": json.loads(to_json(step, NAMESPACES)),
            "facts": {node.name: data for node in step.graph.nodes if (data := _facts(node))},
            "parameters": [_fields(parameter) for parameter in step.parameters],
            "units": sorted(step.units),
            "num_micro_batches": step.num_micro_batches,
            "slices": [asdict(entry) for entry in step.slices],
            "cut_pieces": sorted(step.cut_pieces),
            "reduced": {str(bucket): node.name for bucket, node in step.reduced.items()},
            "layer_squares": None if step.layer_squares is None else step.layer_squares.name,
            "kept_gradients": [node.name for node in step.kept_gradients],
            "clipping": _node_names(step.clipping),
            "unscaling": _node_names(step.unscaling),
            "guarded": step.guarded,
            "groups": dict(self.groups),
            "programs": [_program_data(element) for element in programs],
            "program_of": {name: place[id(item)] for name, item in self.programs.items()},
            "divided": sorted(self.divided),
            "layout": None if layout is None else layout_data(layout),
        })  # fmt: skip


def _read(text: str) -> SavedGraph:
    data = json.loads(text)
    if data["format"] != _FORMAT or "graph" not in data:
        raise ValueError("it was written by another version of zerofx, or is no graph")
    if not isinstance(data["graph"], dict):
        raise ValueError("it is a plan, not a graph")
    parameters = tuple(ParameterInfo(**_decoded_fields(element)) for element in data["parameters"])
    blank = StepGraph(fx.Graph(), torch.device("cpu"), parameters, frozenset(data["units"]))
    step = from_json(json.dumps(data["graph"]), blank, fake_mode(), NAMESPACES)
    by_name = step.by_name()
    for name, facts in data["facts"].items():
        _set_facts(by_name[name], facts)
    step = replace(
        step,
        num_micro_batches=int(data["num_micro_batches"]),
        slices=tuple(SliceDecision(**item) for item in data["slices"]),
        cut_pieces=frozenset(data["cut_pieces"]),
        reduced={int(bucket): by_name[name] for bucket, name in data["reduced"].items()},
        clipping=_of_nodes(Clipping, data["clipping"], by_name),
        layer_squares=None if data["layer_squares"] is None else by_name[data["layer_squares"]],
        kept_gradients=tuple(by_name[name] for name in data["kept_gradients"]),
        unscaling=_of_nodes(Unscaling, data["unscaling"], by_name),
        guarded=bool(data["guarded"]),
    )
    programs = [_program(entry) for entry in data["programs"]]
    layout = data["layout"]
    return SavedGraph(
        step,
        data["groups"],
        {name: programs[number] for name, number in data["program_of"].items()},
        frozenset(data["divided"]),
        None if layout is None else read_layout(layout),
    )


def _node_names(record: Clipping | Unscaling | None) -> list[str | None] | None:
    """The nodes that are the fields of a dataclass, by their names."""
    if record is None:
        return None
    nodes = [getattr(record, each.name) for each in fields(record)]
    return [None if node is None else node.name for node in nodes]


def _of_nodes(kind: type[T], names: list[str | None] | None, by_name: Mapping[str, fx.Node]) -> T | None:
    if names is None:
        return None
    return kind(*(None if name is None else by_name[name] for name in names))


def _facts(node: fx.Node) -> dict[str, Any]:
    """What the graph's own text leaves out."""
    facts: dict[str, Any] = {}
    if plain := plain_facts(node):
        facts["plain"] = plain
    if (task := task_of(node)) is not None:
        facts["task"] = [task.job, task.index]
    if node.op == "placeholder":
        facts["placeholder"] = asdict(placeholder(node))
    return facts


def _set_facts(node: fx.Node, facts: Mapping[str, Any]) -> None:
    set_plain_facts(node, facts.get("plain", {}))
    if "task" in facts:
        job, index = facts["task"]
        set_task(node, Task(Job(job), index))
    if "placeholder" in facts:
        given = facts["placeholder"]
        set_placeholder(node, Placeholder(**{**given, "role": Role(given["role"])}))


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them."""
    return {each.name: encoded(getattr(record, each.name)) for each in fields(record)}


def _decoded_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: decoded(entry) for name, entry in data.items()}


def _program_data(program: UpdateProgram) -> dict[str, Any]:
    return {
        "nodes": encoded_nodes(program.graph, NAMESPACES),
        "states": [_fields(state) for state in program.states],
        "scalar_states": [_fields(entry) for entry in program.scalar_states],
        "before": sorted(program.state_before),
        "after": sorted(program.state_after),
        **{name: encoded(getattr(program, name)) for name in _PLAIN_FIELDS},
    }


_PLAIN_FIELDS = ("optimizer", "tensor_scalars", "num_scalars", "host_name", "dtype", "fused", "first_step_only")


def _program(data: Mapping[str, Any]) -> UpdateProgram:
    return UpdateProgram(
        graph=decoded_nodes(data["nodes"], NAMESPACES)[0].graph,
        host_source="",
        states=tuple(StateSpec(**_decoded_fields(entry)) for entry in data["states"]),
        scalar_states=tuple(ScalarStateSpec(**_decoded_fields(element)) for element in data["scalar_states"]),
        state_before=frozenset(data["before"]),
        state_after=frozenset(data["after"]),
        **{name: decoded(data[name]) for name in _PLAIN_FIELDS},
    )
