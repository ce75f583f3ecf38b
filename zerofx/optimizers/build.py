"""Turn the records of a step into the fx graph of the update on flat buffers."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx.errors import OptimizerError
from zerofx.optimizers.program import StateSpec
from zerofx.optimizers.recorder import Heard, OpRecord, Ref
from zerofx.torch_private.operators import base_name, pytree, schema_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class FlatState:
    """A tensor state after the recorded step: its value, and the record that made its memory (None for an input).

    ``is_single``: a 0-dim tensor that a fused kernel reads, the others are flat.
    """

    value: Ref
    made_by: int | None
    dtype: torch.dtype
    is_single: bool


@dataclass(frozen=True)
class BuiltUpdate:
    """The graph and what has to be fed to it."""

    graph: Graph
    states: tuple[StateSpec, ...]
    tensor_scalars: tuple[StateSpec, ...]
    scalars: tuple[Heard, ...]


def build_graph(
    records: tuple[OpRecord, ...], after: Mapping[str, FlatState], before: Mapping[str, float | None]
) -> BuiltUpdate:
    """The graph of a step, in which every state is a buffer that exists before the step.

    Args:
        records: what the step did.
        after: the tensor states that it leaves.
        before: states that had values before the step, with what fills them before the first step, if anything does;
            the others were made by it.
    """
    whole = list(records)
    states: list[StateSpec] = []
    singles: list[StateSpec] = []
    for name, state in after.items():
        if name in before:
            fill = before[name]
            if not _is_value_of(whole, state.value, name):
                whole.append(OpRecord(_aten.copy_.default, (Ref(name), state.value), (), Ref(f"%{len(whole)}")))
        else:
            fill, whole = _adopt_buffer(whole, state.made_by, state.value, name)
        spec = StateSpec(name, state.dtype, 0.0 if fill is None else fill, written_first=fill is None)
        (singles if state.is_single else states).append(spec)
    return _emit(whole, tuple(states), tuple(singles))


def _is_value_of(records: list[OpRecord], value: Ref, name: str) -> bool:
    """True if ``value`` lies in the buffer ``name``: it is the buffer, or a chain of in-place operators on it."""
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
    elif kind == "full_like" and isinstance(maker.args[1], Heard):
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


def _emit(records: list[OpRecord], states: tuple[StateSpec, ...], singles: tuple[StateSpec, ...]) -> BuiltUpdate:
    names = [spec.name for spec in (*states, *singles)]
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in ("param", "grad"):
            raise OptimizerError(f'expected state names that are Python identifiers, found state["{name}"]: rename it')
    records = _live(records)
    leaves = [leaf for record in records for leaf in pytree.tree_leaves((record.args, record.kwargs))]
    scalars = tuple(leaf for leaf in leaves if isinstance(leaf, Heard))
    graph = Graph()
    nodes: dict[Any, Node] = {Ref(name): graph.placeholder(name) for name in ("param", "grad", *names)}
    for index, heard in enumerate(scalars):
        nodes[heard] = graph.placeholder(f"s{index}")

    def resolve(value: Any) -> Any:
        if isinstance(value, tuple):
            return [resolve(x) for x in value]
        return nodes[value] if isinstance(value, (Ref, Heard)) else value

    for record in records:
        keywords = {key: resolve(value) for key, value in record.kwargs}
        args = tuple(resolve(value) for value in record.args)
        nodes[record.out] = graph.create_node("call_function", record.op, args, keywords, name=base_name(record.op))
    graph.output(())
    graph.lint()
    return BuiltUpdate(graph, states, singles, scalars)


def _live(records: list[OpRecord]) -> list[OpRecord]:
    """The records that write a tensor, or whose result a later one reads."""
    live: list[OpRecord] = []
    read: set[Ref] = set()
    for record in reversed(records):
        if schema_of(record.op).is_mutable or record.out in read:
            live.append(record)
            read.update(leaf for leaf in pytree.tree_leaves((record.args, record.kwargs)) if isinstance(leaf, Ref))
    return live[::-1]
