"""Turn a trace into the fx graph of the update on flat buffers."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx.errors import OptimizerError
from zerofx.optimizers.program import StateSpec
from zerofx.optimizers.recorder import OpRecord, Ref
from zerofx.optimizers.scalars import EXPR_TYPES, Expr, is_constant
from zerofx.optimizers.trace import Trace
from zerofx.torch_private.operators import base_name, pytree, schema_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class ScalarUse:
    """A scalar input of the graph: its expression, and the first operator and tensor it goes to."""

    expr: Expr
    used_by: str


@dataclass(frozen=True)
class BuiltUpdate:
    """The graph and what has to be fed to it."""

    graph: Graph
    states: tuple[StateSpec, ...]
    tensor_scalars: tuple[str, ...]
    scalars: tuple[ScalarUse, ...]


def build_graph(
    trace: Trace, present: frozenset[str] = frozenset(), initial: Mapping[str, float] = MappingProxyType({})
) -> BuiltUpdate:
    """The graph of ``trace``, in which every state is a buffer that exists before the step.

    Args:
        trace: what the step did.
        present: states that had values before the step; the others were made by it.
        initial: fill values of the present flat states, as far as they have one.
    """
    records = list(trace.records)
    specs: list[StateSpec] = []
    tensor_scalars: list[str] = []
    for name, state in trace.flat.items():
        if name in present:
            fill: float | None = initial.get(name)
            if not _is_value_of(records, state.value, name):
                records.append(OpRecord(_aten.copy_.default, (Ref(name), state.value), (), Ref(f"%{len(records)}")))
        else:
            fill, records = _adopt_buffer(records, state.made_by, state.value, name)
        if state.is_scalar:
            tensor_scalars.append(name)
        else:
            specs.append(StateSpec(name, state.dtype, 0.0 if fill is None else fill, written_first=fill is None))
    inputs = ["param", "grad", *(spec.name for spec in specs), *tensor_scalars]
    return _emit(records, inputs, tuple(specs), tuple(tensor_scalars))


def _is_value_of(records: list[OpRecord], value: Ref, name: str) -> bool:
    """Whether ``value`` lies in the buffer ``name``: it is the buffer, or a chain of in-place operators on it."""
    by_name = {record.out.name: record for record in records}
    while value.name in by_name:
        record = by_name[value.name]
        if not schema_of(record.op).is_mutable or not isinstance(record.args[0], Ref):
            return False
        value = record.args[0]
    return value.name == name


def _adopt_buffer(
    records: list[OpRecord], made_by: int | None, value: Ref, name: str
) -> tuple[float | None, list[OpRecord]]:
    """Make the memory of a new state the buffer ``name``: its constant fill value (or None), and the new records."""
    maker = records[made_by] if made_by is not None else None
    kind = base_name(maker.op) if maker is not None else ""
    if maker is None or made_by is None or kind not in ("full_like", "empty_like", "clone"):
        return None, [*records, OpRecord(_aten.copy_.default, (Ref(name), value), (), Ref(f"%{len(records)}"))]
    fill: float | None = None
    if kind == "clone":
        first: OpRecord | None = OpRecord(_aten.copy_.default, (Ref(name), maker.args[0]), (), maker.out)
    elif kind == "full_like" and not is_constant(maker.args[1]):
        first = OpRecord(_aten.fill_.Scalar, (Ref(name), maker.args[1]), (), maker.out)
    else:
        fill, first = float(maker.args[1]) if kind == "full_like" else None, None
    if first is not None:
        return fill, [*records[:made_by], first, *records[made_by + 1 :]]
    # An entry that is never read keeps the indices of the other records as they are.
    renamed = [_rename(record, maker.out, Ref(name)) for record in records]
    renamed[made_by] = replace(maker, out=Ref(f"unused {maker.out.name}"))
    return fill, renamed


def _rename(record: OpRecord, old: Ref, new: Ref) -> OpRecord:
    def swap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(swap(x) for x in value)
        return new if value == old else value

    return replace(record, args=swap(record.args), kwargs=tuple((key, swap(value)) for key, value in record.kwargs))


def _emit(
    records: list[OpRecord], inputs: list[str], states: tuple[StateSpec, ...], tensor_scalars: tuple[str, ...]
) -> BuiltUpdate:
    for name in inputs[2:]:
        if not name.isidentifier() or keyword.iskeyword(name) or name in ("param", "grad"):
            raise OptimizerError(f'expected state names that are Python identifiers, found state["{name}"]: rename it')
    records = _live(records)
    scalars: dict[Expr, ScalarUse] = {}
    for record in records:
        for value in pytree.tree_leaves((record.args, record.kwargs)):
            if isinstance(value, EXPR_TYPES) and value not in scalars:
                scalars[value] = ScalarUse(value, base_name(record.op))
    graph = Graph()
    nodes: dict[Any, Node] = {Ref(name): graph.placeholder(name) for name in inputs}
    for index, expr in enumerate(scalars):
        nodes[expr] = graph.placeholder(f"s{index}")

    def resolve(value: Any) -> Any:
        if isinstance(value, tuple):
            return [resolve(x) for x in value]
        return nodes[value] if isinstance(value, (Ref, *EXPR_TYPES)) else value

    for record in records:
        keywords = {key: resolve(value) for key, value in record.kwargs}
        args = tuple(resolve(value) for value in record.args)
        nodes[record.out] = graph.create_node("call_function", record.op, args, keywords, name=base_name(record.op))
    graph.output(())
    graph.lint()
    return BuiltUpdate(graph, states, tensor_scalars, tuple(scalars.values()))


def _live(records: list[OpRecord]) -> list[OpRecord]:
    """The records that write a tensor, or whose result a later one reads."""
    live: list[OpRecord] = []
    read: set[Ref] = set()
    for record in reversed(records):
        if schema_of(record.op).is_mutable or record.out in read:
            live.append(record)
            read.update(leaf for leaf in pytree.tree_leaves((record.args, record.kwargs)) if isinstance(leaf, Ref))
    return live[::-1]
