"""Parameters of tensor subclasses, taken apart into the plain tensors that they consist of.

    q_proj.weight: Params4bit       ->     q_proj.weight                      uint8[8192, 1]: codes
                                           q_proj.weight.quant_state.absmax   float32[256]: scales
                                           q_proj.weight.quant_state.code     float32[16]: a table

A step knows the parts alone: each is a frozen input with a layout of its own, stored, gathered and moved as it is. The
user's tensor stays the object that it was, and holds the same parts; so it is whole wherever these are. A part of at
most ``TABLE_NUMEL`` elements is a buffer to a step: every rank has it, at all times, since what saves a model reads it.

A subclass says of what it consists by ``__tensor_flatten__``, as ``torch.compile`` asks of it. One that has memory of
its own, and Python attributes for the rest, is a parameter with these attributes: ``bitsandbytes.nn.Params4bit`` is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.ir.op_kernels.own_draws import generator_of
from zerofx.torch_private.tensors import flattens, memory_of

TABLE_NUMEL = 256  # of the largest table of codes: one of 8 bits
_DEEPEST = 3  # of records in records
HELD_CLASS = "__held_class__"
"""The attribute of a class in which a step holds tensors: what these are of while it does not."""


def class_of(tensor: torch.Tensor) -> type:
    """The class of a tensor, also while a step holds it."""
    kind = type(tensor)
    held = getattr(kind, HELD_CLASS, kind)
    assert isinstance(held, type)
    return held


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a parameter consists of, by the paths to them; none for one that is plain.

    The path of the parameter itself, where its own memory is one of them, is empty.
    """
    kind = class_of(tensor)
    if kind in (torch.Tensor, nn.Parameter):
        return {}
    if flattens(tensor, kind):
        parts: dict[str, torch.Tensor] = {}
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            parts |= {f"{name}.{path}": part for path, part in parts_of(inner).items()} or {name: inner}
        return parts
    attributes = dict(_tensors_in(vars(tensor))) if issubclass(kind, nn.Parameter) else {}
    return {"": tensor} | attributes if attributes else {}


def remember_attributes(table: MutableMapping[str, Any], name: str) -> Callable[[], bool]:
    """Remember a parameter that consists of its memory and attributes, and these, as a table of a module has it.

    Returns a function that puts both back, and says whether any attribute was another: a library may keep codes in
    another order for a while, with other scales. Another parameter is taken out where it lies in the same memory: peft
    makes such, where a CPU computes DoRA.
    """
    tensor = table[name]
    if "" not in parts_of(tensor):
        return lambda: False
    held = [(record, dict(record)) for record in _records_in(vars(tensor))]

    def put_back() -> bool:
        changed = False
        for record, before in held:
            private = {name: value for name, value in record.items() if name.startswith("_")}
            now, then = record.keys() - private.keys(), {name for name in before if not name.startswith("_")}
            if now != then or any(record[name] is not before[name] for name in then):
                changed = True
                record.clear()
                record.update({name: before[name] for name in before if name in then} | private)
        if (shown := table.get(name)) is not None and memory_of(shown) == memory_of(tensor):
            table[name] = tensor
        return changed

    return put_back


def named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """``model.named_parameters()``, with the parts of each in its place, but for tables."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        parts = parts_of(parameter)
        if not parts:
            yield name, parameter
        yield from ((path_name(name, path), part) for path, part in parts.items() if not is_table(part))


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """``model.named_buffers()``, and after them the tables of parameters."""
    yield from model.named_buffers(remove_duplicate=remove_duplicate)
    yield from tables_of(model, remove_duplicate=remove_duplicate)


def tables_of(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The tables among the parts of parameters, by their names in a step."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        for path, part in parts_of(parameter).items():
            if is_table(part) and not (remove_duplicate and id(part) in seen):
                seen.add(id(part))
                yield path_name(name, path), part


def parameters_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a param group but those that a step takes apart, none of whose parts an optimizer knows: they
    are frozen, and stand in a group where a user gives an optimizer all of ``model.parameters()``."""

    def is_one(parameter: torch.Tensor) -> bool:
        parts = parts_of(parameter)
        return not parts or ("" in parts and not is_table(parameter))

    return [parameter for parameter in group["params"] if is_one(parameter)]


def is_table(part: torch.Tensor) -> bool:
    """True for a part that is a buffer to a step."""
    return part.numel() <= TABLE_NUMEL


def check_frozen(name: str, parameter: torch.Tensor) -> None:
    """Check that a parameter of several parts is not trained.

    Raises:
        UsageError: it is; the message says why one of its class cannot be.
    """
    if not parameter.requires_grad or not (parts := parts_of(parameter)):
        return
    first = next(iter(parts.values()))
    reason, advice = "codes have none", "Call"
    if len(parts) == 1 and (first.shape, first.dtype) == (parameter.shape, parameter.dtype):
        reason = "it is one plain tensor, which its class computes with in another way"
        advice = (
            "Have a module compute so with a plain parameter, which is trained (of torchao: MXFP8Linear, Float8Linear, "
            "module_swap=True); or call"
        )
    elif _draws(parameter):
        reason = (
            "its class rounds at random in each update, and processes that update other parameters would draw other "
            "numbers than one process does"
        )
        advice = "Keep its layer in 16 or 32 bits, and round in products (precision='fp8', for example); or call"
    raise UsageError(
        f"expected parameters of tensor subclasses to be frozen, found that {name}, a {class_of(parameter).__name__}, "
        f"requires a gradient: {reason}. {advice} requires_grad_(False) on it, and train adapters (LoRA) next to it"
    )


def _draws(parameter: torch.Tensor) -> bool:
    """True if an update in place draws random numbers, which is tried on a copy."""
    generator = generator_of(parameter.device)
    before = generator.get_state()
    with torch.no_grad(), contextlib.suppress(Exception):  # there may be no such update
        parameter.detach().clone().add_(torch.zeros_like(parameter))
    draws = not torch.equal(before, generator.get_state())
    generator.set_state(before)
    return draws


def path_name(name: str, path: str) -> str:
    """The name of what is at ``path`` in something; either may be empty."""
    return f"{name}.{path}" if name and path else name or path


def parts_below(name: str, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of ``parts`` that are in what is called ``name``, by their paths in it."""
    prefix = f"{name}."
    return {path.removeprefix(prefix): part for path, part in parts.items() if path.startswith(prefix)}


def is_record(name: str, value: Any) -> bool:
    """True for an attribute that holds others, as a state of quantisation does."""
    is_plain = not isinstance(value, torch.Tensor | nn.Module | type) and not callable(value)
    return is_plain and not name.startswith("_") and hasattr(value, "__dict__")


def _tensors_in(attributes: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among attributes, and in records among these, by their paths; what is private is none of them."""
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor) and not name.startswith("_"):
            yield name, value
        elif is_record(name, value) and depth < _DEEPEST:
            yield from ((f"{name}.{path}", tensor) for path, tensor in _tensors_in(vars(value), depth + 1))


def _records_in(attributes: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The attributes, and those of records among them."""
    yield attributes
    for name, value in list(attributes.items()):
        if is_record(name, value) and depth < _DEEPEST:
            yield from _records_in(vars(value), depth + 1)
