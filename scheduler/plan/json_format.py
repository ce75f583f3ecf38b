"""A plan as JSON, to be saved, compared between ranks, and read again."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from zerofx.errors import PlanError
from zerofx.scheduler.plan.mesh import SHARD

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from zerofx.scheduler.plan.plan import Plan

P = TypeVar("P", bound="DataclassInstance")

_FORMAT = 1
# Entries that a plan has only where they say something.
_LEFT_OUT: dict[str, Any] = {
    "wire": "exact", "ranks_per_node": None, "wires": (), "pieces": (), "max_grad_norm": None, "loss_scaled": False,
    "grad_norms": False,
    "replicate": 1, "model": 1, "shardings": (), "overlaps": (), "spreads": (), "states_reason": "",
}  # fmt: skip


def as_data(plan: Plan) -> dict[str, Any]:
    """All that a plan holds, as dicts, but for what most plans say nothing of: the wire, pieces, clipping, scaling,
    axes of the mesh, what tiles are of, where gathered sums are awaited, what is reduced in each micro-batch, dtypes of
    gradients and states that are others than usual."""
    data = asdict(plan)
    for bucket in data["buckets"]:
        for name in ("reduce_dtype", "state_dtype", "lent"):
            if bucket[name] in (None, False):
                del bucket[name]
    for reduce in data["reduces"]:
        if reduce["gathered_after"] == "":
            del reduce["gathered_after"]
        if reduce["crossed_after"] == "":
            del reduce["crossed_after"]
        if not reduce["earlier"]:
            del reduce["earlier"]
    for bucket in data["buckets"]:
        for name in ("gathered_over", "states_over"):
            if bucket[name] == SHARD:
                del bucket[name]
    for tile in data["tiles"]:
        if tile["over"] == "rows":
            del tile["over"]
    for name, nothing in _LEFT_OUT.items():
        if data[name] == nothing:
            del data[name]
    if plan.prediction is not None and not plan.prediction.node_wire_bytes:
        del data["prediction"]["node_wire_bytes"]
    return data


def to_text(plan: Plan) -> str:
    """The plan as JSON text, which ``read_plan`` reads."""
    return json.dumps({"format": _FORMAT, **as_data(plan)}, indent=1, sort_keys=True)


def read_plan(kind: type[P], text: str) -> P:
    """The plan, of type ``kind``, that ``to_text`` has written.

    Raises:
        PlanError: the text is no plan of this format.
    """
    try:
        data = json.loads(text)
        if data.pop("format") != _FORMAT:
            raise PlanError(f"expected a plan of format {_FORMAT}; make the plan anew with this version of zerofx")
        data = {
            name: list(default) if isinstance(default, tuple) else default for name, default in _LEFT_OUT.items()
        } | data
        return typed(kind, {entry.name: data[entry.name] for entry in fields(kind)})  # a saved report has more
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"expected the JSON of a zerofx plan, found something else: {error!r}") from error


def typed(kind: type[P], data: Any) -> P:
    """A dataclass of plain data from what JSON has for it.

    Raises:
        TypeError, ValueError: there is another field, or a value that is not of its field's type.
    """
    hints = _hints(kind)
    if not isinstance(data, dict):
        raise TypeError(f"expected the fields of a {kind.__name__}, found a {type(data).__name__}")
    if data.keys() - hints.keys():
        raise TypeError(f"{', '.join(sorted(data.keys() - hints.keys()))}: no field of a {kind.__name__}")
    return kind(**{name: _typed(hints[name], value) for name, value in data.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(expected: Any, value: Any) -> Any:
    """What JSON has for a value of type ``expected``: lists for tuples, dicts for dataclasses."""
    origin, inner = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (expected,) = (option for option in inner if option is not NoneType)
        return _typed(expected, value)
    if origin is tuple and isinstance(value, list):
        each = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_typed(kind, item) for kind, item in zip(each, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: _typed(inner[1], item) for name, item in value.items()}
    if origin is Literal and value in inner:
        return value
    if isinstance(expected, type) and is_dataclass(expected):
        return typed(expected, value)
    if value != value:  # no plan has it, and nothing can be drawn of it
        raise ValueError("expected a number, found NaN")
    if type(value) is expected or (expected is float and type(value) is int):
        return value
    raise TypeError(f"expected {expected}, found {value!r:.80}")
