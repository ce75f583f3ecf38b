"""Stages that are alike but for names: the plan of one, searched for once, is that of the others under their names.

    stage 1: layers 10 to 19, recompute mul_27          stage 1: layers 10 to 19, recompute mul_27
    stage 2: layers 20 to 29                      ->    stage 2: layers 20 to 29, recompute mul_45

Plans name layers, parameters, buckets, nodes of the captured graph, and those that tiles and recomputation add. These
are at the same places of the other graph, once what is named there has been renamed. A renamed plan is carried out like
any other; where it comes to other bytes or seconds than it did, it is not taken.

Not handled: stages that take micro-batches by turns, which hold as many as there are stages after them, and so differ;
plans with parameters in slices, which are other parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from zerofx.driver.prepared import Prepared
from zerofx.ir import ops
from zerofx.ir.canonical import Number, describe_value
from zerofx.ir.facts import origin, placeholder, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.json_format import from_data, to_data
from zerofx.lowering.lower import LoweredStep
from zerofx.pipeline import PLAN, run_quietly
from zerofx.scheduler.decide.undecided import summarise, undecided
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.prefixes import CARRIED_OUT

# Names with digits or dots: what else stands in a reason is a word.
_NAME = re.compile(r"[A-Za-z_](?:[\w.]*\w)?")
_MESSAGES = (ops.send_value, ops.receive_value)


@dataclass(frozen=True)
class Structure:
    """A stage as it is planned."""

    prepared: Prepared
    graph: StepGraph

    @staticmethod
    def of(prepared: Prepared, plan: Plan) -> Structure:
        """The structure of the step that has been prepared, in the variant that ``plan`` is for."""
        prepared = prepared.adapt_to(plan)
        return Structure(prepared, prepared.graph_for(plan))

    def is_like(self, other: Structure) -> bool:
        """True if the stages are alike: their graphs, buckets and updates have one text without names."""
        return len(self.graph.graph.nodes) == len(other.graph.graph.nodes) and self._read[0] == other._read[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that, in the order in which they come in the text."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[str, tuple[str, ...]]:
        return _Reader(self.graph).read(self.prepared)

    def names_with_plan(self, plan: Plan) -> list[str]:
        """The names of all nodes once tiles and recomputation are carried out, in order."""
        prepared, step = self.prepared, self.graph.clone()
        later = {entry.name for entry in PLAN} - {*CARRIED_OUT}
        run_quietly(step, plan, prepared.layout, prepared.programs, prepared.request.settings, later)
        return [node.name for node in step.graph.nodes]


class _Reader:
    """Writes the text of a structure, with the place of each name among those that came before it."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._places: dict[str, int] = {}

    def read(self, prepared: Prepared) -> tuple[str, tuple[str, ...]]:
        graph, numbers = self._graph, dict[fx.Node, Number]()
        lines = []
        for node in graph.graph.nodes:
            args = fx.map_arg((self._arguments(node), node.kwargs), numbers.__getitem__)
            numbers[node] = Number.from_place(len(numbers))
            facts = f"{self._place(node.name)} {self._facts(node)} {tier_of(node)} {describe_value(node)}"
            lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args} {facts}")
        buckets = prepared.layout.buckets
        lines += [repr(replace(summarise(bucket), name=str(self._place(bucket.name)))) for bucket in buckets]
        for updates in prepared.updates:
            lines += [f"{index}: {program.text}" for index, program in sorted(updates.items())]
        lines.append(repr((graph.num_micro_batches, graph.by_layer, graph.num_before, graph.guarded, graph.num_extras)))
        return "\n".join(lines), tuple(self._places)

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """A node's arguments, where a message says only whether the stage at its other end is an earlier one."""
        if node.target not in _MESSAGES or self._graph.pipe is None:
            return node.args
        at = 1 if node.target is ops.send_value else 0
        other = node.args[at]
        assert isinstance(other, int), "messages go to a stage by its number"
        return (*node.args[:at], other < self._graph.pipe.number, *node.args[at + 1 :])

    def _facts(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            facts = placeholder(node)
            return f"{facts.role} {self._place(facts.name)} {facts.bucket} {facts.part} {facts.is_lent}"
        where = origin(node)
        return f"{where.phase} {self._place(where.layer)} {self._place(self._graph.unit_of(node))}"

    def _place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))


@dataclass(frozen=True)
class KnownStage:
    """A stage that has been planned, and what that came to."""

    structure: Structure
    lowered: LoweredStep

    @cached_property
    def _data(self) -> Any:
        return to_data(self.lowered.plan)

    @cached_property
    def _node_names(self) -> list[str]:
        return self.structure.names_with_plan(self.lowered.plan)

    def plan_for(self, other: Structure) -> Plan | None:
        """The plan of this stage for another; None where they are not alike."""
        own, graph = self.lowered.plan, other.graph
        if graph.takes_turns or not self.structure.is_like(other):
            return None
        blank = undecided(graph, other.prepared.layout, own.stage, own.precision, own.machine)
        names = dict(zip(self.structure.names, other.names, strict=True))
        node_names = other.names_with_plan(from_data(Plan, _rename(self._data, names)))
        names |= dict(zip(self._node_names, node_names, strict=True))
        return replace(
            from_data(Plan, _rename(self._data, names)),
            graph=blank.graph, buckets=blank.buckets, summary=blank.summary, stage_cuts=blank.stage_cuts,
            pipe_stage=blank.pipe_stage,
        )  # fmt: skip

    def comes_to(self, lowered: LoweredStep) -> bool:
        """True if another stage takes what this one does."""
        ours, theirs = self.lowered.plan, lowered.plan
        return ours.peak_bytes == theirs.peak_bytes and ours.step_seconds == theirs.step_seconds


def _rename(data: Any, names: dict[str, str]) -> Any:
    if isinstance(data, dict):
        return {key: _rename(each, names) for key, each in data.items()}
    if isinstance(data, list | tuple):
        return [_rename(each, names) for each in data]
    if not isinstance(data, str):
        return data
    if " " not in data:
        return names.get(data, data)
    return _NAME.sub(lambda match: names.get(match[0], match[0]) if _is_no_word(match[0]) else match[0], data)


def _is_no_word(text: str) -> bool:
    return "." in text or any(map(str.isdigit, text))
