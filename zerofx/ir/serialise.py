"""Write a captured graph as JSON and read it back: operators by name, fake values by their layout."""

from __future__ import annotations

import functools
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from enum import Enum
from keyword import iskeyword
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.canonical import graph_parts
from zerofx.ir.facts import (
    Job,
    Origin,
    Phase,
    Placeholder,
    Role,
    Task,
    known_origin,
    placeholder,
    set_origin,
    set_placeholder,
    set_source_line,
    set_value,
    source_line,
)
from zerofx.ir.graph import Clipping, StepGraph, Unscaling
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.returned import Returned
from zerofx.precision import dtype_name, dtype_named
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import Sharded
from zerofx.torch_private.operators import OpOverload, schema_of

LARGEST_LITERAL = 64  # elements of a constant that is kept by its values
TORCH_NAMESPACES = frozenset({"aten", "prims"})  # of operators that are torch's: what they do follows from its version
OWN_NAMESPACE = "zerofx"  # of those that passes put in
NAMESPACES = TORCH_NAMESPACES | {OWN_NAMESPACE}  # of those of a step after passes
_TARGET, _VALUE = 2, 5  # the places of a target, and of a value's number, among what is written of a node
_PLAIN = (type(None), bool, int, float, str)
_NAMED: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
# Facts that come with a graph: fields that equality compares, in order, or an enum's word.
_RECORDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        Bucket, BucketLayout, Clipping, Job, Mesh, ParameterInfo, Placeholder, Role, Sharded, TileDecision, Slot, Task,
        Unscaling,
    )
}  # fmt: skip
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "size": torch.Size, "slice": lambda bounds: slice(*bounds), "set": frozenset, "dict": dict,
}  # fmt: skip


class NotStorableError(Exception):
    """The graph has something without a text form; the message names it."""


def normal_name(text: str) -> str:
    """A name as Python reads it, which takes some letters for others."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a program: an argument that is what the name stands for.

    Raises:
        ValueError: Python has no such name, or reads it as another.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.isidentifier() or iskeyword(self.text):
            raise ValueError(f"expected a name, found {self.text!r}")
        if self.text != normal_name(self.text):
            raise ValueError(f"expected a name as Python reads it, found {self.text!r}")


def to_json(step: StepGraph, namespaces: frozenset[str] = TORCH_NAMESPACES) -> str:
    """All that ``from_json`` needs besides the model's parameters and units, which are not kept.

    ``namespaces`` are those of operators that the graph may call.

    Raises:
        NotStorableError: the graph calls what is not torch's, or has arguments of other kinds than operators take.
    """
    values: dict[str, int] = {}
    lines: dict[str, int] = {}
    nodes = encode_nodes(step.graph, namespaces)
    for node, row in zip(step.graph.nodes, nodes, strict=True):
        if node.op != "call_function":
            row[_TARGET] = [placeholder(node).role, placeholder(node).name] if node.op == "placeholder" else None
        fake, where = json.dumps(encode(node.meta.get("val"))), known_origin(node)
        row += [
            values.setdefault(fake, len(values)),
            [where.layer, where.phase] if where is not None else None,
            lines.setdefault(source_line(node), len(lines)),
        ]
    return json.dumps(
        {
            "device": str(step.device),
            "values": [json.loads(fake) for fake in values],
            "lines": list(lines),
            "nodes": nodes,
            "extras": step.num_extras,
            "whole": sorted(step.returned.whole),
            "mutations": step.mutation_names,
            "gradients": step.gradient_names,
            "constants": {name: encode_constant(constant) for name, constant in step.constants.items()},
        }
    )


def from_json(
    text: str, like: StepGraph, mode: AbstractContextManager[Any], namespaces: frozenset[str] = TORCH_NAMESPACES
) -> StepGraph:
    """The graph that ``to_json`` has written, with fake values made in ``mode``; what is not in it is ``like``'s.

    Raises:
        Exception: one of ``zerofx.disk.cache.MALFORMED``, the text is nothing that ``to_json`` has written.
    """
    data = json.loads(text)
    nodes = decode_nodes(data["nodes"], namespaces)
    known = {parameter.name for parameter in like.parameters}
    with mode:
        values = [decode(fake, []) for fake in data["values"]]
    for node, (_, _, target, _, _, fake, where, line) in zip(nodes, data["nodes"], strict=True):
        if node.op != "output":
            set_value(node, values[fake])
        if node.op == "placeholder":
            facts = Placeholder(Role(target[0]), target[1])
            if facts.role is Role.PARAMETER and facts.name not in known:
                raise ValueError(f"expected a parameter of the model, found {facts.name!r}")
            set_placeholder(node, facts)
        if where is not None:
            set_origin(node, Origin(where[0], Phase(where[1])))
        set_source_line(node, data["lines"][line])
    return replace(
        like,
        graph=nodes[0].graph,
        device=torch.device(data["device"]),
        num_extras=int(data["extras"]),
        returned=Returned(whole=frozenset(map(int, data["whole"]))),
        mutation_names=list(data["mutations"]),
        gradient_names=list(data["gradients"]),
        constants={name: decode_constant(*constant) for name, constant in data["constants"].items()},
    )


def inline_values(text: str) -> str:
    """Rewrite ``to_json``'s text with each node's value instead of its number, as graphs of other sizes share other
    values."""
    data = json.loads(text)
    for node in data["nodes"]:
        node[_VALUE] = data["values"][node[_VALUE]]
    return json.dumps({**data, "values": []})


def share_values(text: str) -> str:
    """Undo ``inline_values``."""
    data = json.loads(text)
    values: dict[str, int] = {}
    for node in data["nodes"]:
        node[_VALUE] = values.setdefault(json.dumps(node[_VALUE]), len(values))
    return json.dumps({**data, "values": list(map(json.loads, values))})


def same_graph(first: StepGraph, other: StepGraph) -> bool:
    """True if two graphs are equal in all that plans and passes read, and in the values of their constants."""
    constants = first.constants.keys() == other.constants.keys() and all(
        torch.equal(constant, other.constants[name]) for name, constant in first.constants.items()
    )
    return constants and graph_parts(first) == graph_parts(other)


def encode_constant(constant: torch.Tensor) -> list[Any]:
    """A small tensor as its values.

    Raises:
        NotStorableError: it is too large, or complex.
    """
    if constant.numel() > LARGEST_LITERAL or constant.dtype.is_complex:
        raise NotStorableError(f"a constant of {constant.numel()} elements of {constant.dtype}")
    return [dtype_name(constant.dtype), str(constant.device), list(constant.shape), constant.flatten().tolist()]


def decode_constant(dtype: str, device: str, shape: list[int], values: list[Any]) -> torch.Tensor:
    """The tensor of ``encode_constant``'s result."""
    return torch.tensor(values, dtype=dtype_named(dtype), device=device).reshape(shape)


def encode_nodes(graph: fx.Graph, namespaces: frozenset[str]) -> list[list[Any]]:
    """Kind, name, target and arguments of each node, for JSON.

    Raises:
        NotStorableError: a node calls no operator of ``namespaces``, or has an argument that has no text.
    """
    places: dict[fx.Node, int] = {}
    rows = []
    for place, node in enumerate(graph.nodes):
        is_plain = node.op in ("placeholder", "output")
        target = str(node.target) if is_plain else operator_text(node.target, namespaces)
        kwargs = {name: encode(argument, places) for name, argument in node.kwargs.items()}
        rows.append([node.op, node.name, target, encode(tuple(node.args), places), kwargs])
        places[node] = place
    return rows


def decode_nodes(rows: Sequence[Sequence[Any]], namespaces: frozenset[str]) -> list[fx.Node]:
    """The nodes of a graph that ``encode_nodes`` has written; a target that is no text is the node's name.

    Raises:
        Exception: one of ``zerofx.disk.cache.MALFORMED``, the rows are nothing that ``encode_nodes`` has written.
    """
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, *_ in rows:
        if op not in ("placeholder", "call_function", "output"):
            raise ValueError(f"expected a node of a graph, found {op!r}")
        given = {key: decode(argument, nodes) for key, argument in kwargs.items()}
        plain = target if isinstance(target, str) else name
        called = operator_of(target, namespaces) if op == "call_function" else plain
        node = graph.create_node(op, called, decode(args, nodes), given, name=Name(name).text)
        node.name = name
        nodes.append(node)
    return nodes


def operator_text(target: Any, namespaces: frozenset[str]) -> str:
    """The text of an operator, for ``operator_of``.

    Raises:
        NotStorableError: it is no operator of one of ``namespaces``.
    """
    for name, function in _functions(namespaces).items():
        if target is function:
            return name
    if isinstance(target, OpOverload) and target.namespace in namespaces:
        return str(target)
    raise NotStorableError(f"{target} is no operator of torch")


def operator_of(text: str, namespaces: frozenset[str]) -> Any:
    """The target of a call in a file.

    Raises:
        ValueError: there is no such operator in ``namespaces``.
    """
    return _functions(namespaces).get(text) or find_operator(text, namespaces)


def _functions(namespaces: frozenset[str]) -> dict[str, Callable[..., Any]]:
    """Targets of calls that are no operators of the dispatcher."""
    own = {"hyperparameters": ops.hyperparameters} if OWN_NAMESPACE in namespaces else {}
    return {"getitem": operator.getitem, **own}


@functools.cache
def find_operator(text: str, namespaces: frozenset[str]) -> OpOverload:
    """The operator of one of ``namespaces`` whose ``str`` is ``text``.

    Raises:
        ValueError: there is none, or it reads or writes files.
    """
    overload = operator.attrgetter(text)(torch.ops) if re.fullmatch(r"\w+\.\w+\.\w+", text) else None
    if not isinstance(overload, OpOverload) or str(overload) != text or overload.namespace not in namespaces:
        raise ValueError(f"expected an operator of {', '.join(sorted(namespaces))}, found {text!r}")
    if any("filename" in argument.name for argument in schema_of(overload).arguments):
        raise ValueError(f"expected an operator that touches no file, found {text!r}")
    return overload


def encode(argument: Any, places: Mapping[fx.Node, int] = MappingProxyType({})) -> Any:
    """An argument, a fake value or a fact as JSON has it; ``places`` are those of nodes.

    Raises:
        NotStorableError: it has no text.
    """
    if type(argument) in _PLAIN:
        return argument
    if isinstance(argument, fx.Node):
        return {"node": places[argument]}
    if isinstance(argument, Name):
        return {"name": argument.text}
    if isinstance(argument, torch.Tensor):
        return {"tensor": _layout(argument)}
    if isinstance(argument, torch.device):
        return {"device": str(argument)}
    if isinstance(argument, slice):
        return {"slice": [encode(bound, places) for bound in (argument.start, argument.stop, argument.step)]}
    if isinstance(argument, list | tuple):
        items = [encode(item, places) for item in argument]
        kind = "size" if isinstance(argument, torch.Size) else "tuple"
        return items if isinstance(argument, list) else {kind: items}
    if isinstance(argument, frozenset | dict):
        entries = sorted(argument) if isinstance(argument, frozenset) else map(list, argument.items())
        return {"set" if isinstance(argument, frozenset) else "dict": [encode(entry, places) for entry in entries]}
    if (name := type(argument).__name__) in _RECORDS and type(argument) is _RECORDS[name]:
        values = (
            [argument.value]
            if isinstance(argument, Enum)
            else [getattr(argument, entry.name) for entry in fields(argument) if entry.compare]
        )
        return {name: [encode(value, places) for value in values]}
    for name, kind_of in _NAMED.items():
        if isinstance(argument, kind_of):
            return {name: str(argument).removeprefix("torch.")}
    raise NotStorableError(f"an argument of type {type(argument).__name__}")


def decode(data: Any, nodes: Sequence[fx.Node] = ()) -> Any:
    """The value that ``encode`` was given; ``nodes`` are the graph's."""
    if isinstance(data, list):
        return [decode(item, nodes) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "node":
        return nodes[content]
    if kind == "name":
        return Name(content)
    if kind == "tensor":
        return _fake(*content)
    if kind == "device":
        return torch.device(content)
    if kind in _NAMED:
        return _torch_constant(kind, content)
    items = [decode(item, nodes) for item in content]
    return _RECORDS[kind](*items) if kind in _RECORDS else _SEQUENCES[kind](items)


def _torch_constant(kind: str, text: str) -> Any:
    """Torch's constant of this name and kind."""
    constant = getattr(torch, text)
    if not isinstance(constant, _NAMED[kind]):
        raise ValueError(f"expected a {kind} of torch, found {text!r}")
    return constant


def _layout(fake: torch.Tensor) -> list[Any]:
    if fake.layout is not torch.strided or fake.is_conj() or fake.is_neg():
        raise NotStorableError(f"a tensor of {fake.layout}")
    numbers = [*fake.shape, *fake.stride(), fake.storage_offset()]
    if any(type(number) is not int for number in numbers):
        raise NotStorableError("a tensor of symbolic size")
    length = fake.untyped_storage().nbytes() // fake.dtype.itemsize
    place = list(fake.shape), list(fake.stride()), fake.storage_offset(), length
    return [dtype_name(fake.dtype), str(fake.device), *place]


def _fake(dtype: str, device: str, shape: list[int], stride: list[int], offset: int, length: int) -> torch.Tensor:
    """A view of a storage of ``length`` elements, as far as it may be read there."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype_named(dtype), device=device)
    if offset == 0 and tensor.untyped_storage().nbytes() == length * tensor.dtype.itemsize:
        return tensor
    return torch.empty(length, dtype=tensor.dtype, device=device).as_strided(shape, stride, offset)
