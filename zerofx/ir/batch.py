"""Flatten a batch into its tensors, and rebuild it around other tensors."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash

from zerofx.errors import UsageError
from zerofx.ir.text import type_text
from zerofx.torch_private.operators import flatten_with_paths, pytree

# What may stand in a batch next to tensors: values that are equal when they print alike.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device, torch.Size)
# Whose static part is the order of their keys. What a defaultdict makes for others often has no text.
_BY_KEY = (dict, OrderedDict, defaultdict)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Batch:
    """A batch taken apart: its tensors in order, and what is needed to call the model with it again.

    Tuples, lists, dicts, other mutable mappings (``BatchEncoding``), dataclasses and whatever is registered with
    torch's pytree are looked into; what such a class has besides its children (pytree's context) is constant, too.
    ``names`` reads like Python on the call ``step(*batch, **keywords)``: ``batch[0]["ids"]`` for what was passed by
    position, ``labels`` for a keyword. No two names are equal: a keyword that could be taken for something else is
    called ``**['batch']``.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]  # name and value of every leaf that is no tensor
    structure: tuple[str, ...]  # what is passed, and the containers with what is static in them
    call: tuple[tuple[Any, ...], dict[str, Any]]
    hashes: Mapping[str, str] = field(default_factory=dict)  # of tensors with the same values in every step, by name

    @staticmethod
    def from_extras(extras: Any) -> Batch:
        """Take apart what ``forward`` returns after its loss, as one argument that is called ``extras``.

        Raises:
            UsageError: as ``of``.
        """
        return Batch._flatten((extras,), {}, "what forward returns after its loss", "extras")

    @staticmethod
    def from_outputs(outputs: Any, *, numbers_only: bool = False) -> tuple[Batch, tuple[str, ...]]:
        """Take apart all that a forward returns, and describe what cannot be, in whose place there is None: a cache.

        ``numbers_only``: tensors of other than one element are left out, too.

        Raises:
            UsageError: what is static in a container cannot be compared; names it.
        """
        unknown: list[str] = []

        def visit(name: str, leaf: Any) -> Any:
            is_large = numbers_only and isinstance(leaf, torch.Tensor) and leaf.numel() != 1
            if isinstance(leaf, (torch.Tensor, *_PLAIN)) and not is_large:
                return leaf
            what = type_text(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            unknown.append(f"{name} {what}".strip())
            return None

        outputs = _map("", outputs, visit, [])
        return Batch._flatten((outputs,), {}, "what forward returns", "outputs"), tuple(unknown)

    @staticmethod
    def from_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Take ``step(*args, **kwargs)`` apart.

        Raises:
            UsageError: a leaf is neither a tensor nor a plain value, or what is static in a container cannot be
                compared; names it.
        """
        return Batch._flatten(args, kwargs, "a batch", "")

    @staticmethod
    def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str, only: str) -> Batch:
        """``only`` is what a single argument is called; empty for the names of a batch."""
        tensors: list[tuple[str, torch.Tensor]] = []
        constants: list[tuple[str, Any]] = []
        structure: list[str] = []

        def visit(name: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append((name, leaf))
            elif isinstance(leaf, _PLAIN):
                constants.append((name, leaf))
            else:
                hint = ": make it a tensor with torch.from_numpy" if isinstance(leaf, np.ndarray) else (
                    ": pass its tensors, or make its class a dataclass"
                )  # fmt: skip
                raise UsageError(
                    f"expected tensors and plain values in {where}, in tuples, lists, dicts or dataclasses, found a "
                    f"{type(leaf).__name__} as {name}{hint}"
                )
            return leaf

        for name, value in _names_and_values(args, kwargs):
            _map(only or name, value, visit, structure)
        return Batch(
            tensors=tuple(tensor for _, tensor in tensors),
            names=tuple(name for name, _ in tensors),
            constants=tuple(constants),
            structure=(f"{len(args)} by position", *sorted(kwargs), *sorted(structure)),
            call=(args, dict(kwargs)),
        )

    def replace_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Batch:
        """The same batch with other tensors."""
        return replace(self, tensors=tensors, call=self.rebuild(tensors))

    def description(self) -> dict[str, str]:
        """Shapes, dtypes, kinds of devices and constants, by name: two batches described alike run the same step.

        Of a tensor that has the same values in every step also their hash.

        Of a device only its kind: each rank has another. ``check_batch`` holds a batch to the one of its rank. What is
        no leaf's stands under a name of two words, which no leaf has.
        """
        described = {name: _describe(tensor) for name, tensor in zip(self.names, self.tensors, strict=True)}
        described |= {name: repr(value) for name, value in self.constants}
        described |= {name: f"{described[name]} with values {value}" for name, value in self.hashes.items()}
        return {name: described[name] for name in sorted(described)} | {"batch structure": ", ".join(self.structure)}

    def size(self) -> int:
        """The number of samples: the leading size of the first tensor that has a dimension, and differs by step.

        Raises:
            UsageError: there is no such tensor.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.dim() and name not in self.hashes:
                return tensor.shape[0]
        raise UsageError(
            "expected a batch to divide into micro-batches, found no tensor with a dimension in it: use accumulate=1"
        )

    def first_of(self, num: int) -> Batch:
        """The first of ``num`` micro-batches.

        Raises:
            UsageError: they would not be of one size.
        """
        if num == 1:
            return self
        size, divided = self.size(), self.divided_names()
        if size % num:
            raise UsageError(
                f"expected a batch size that accumulate={num} divides, found {size}: give batches of a multiple "
                f"of {num} samples, or another accumulate"
            )
        named = zip(self.names, self.tensors, strict=True)
        return self.replace_tensors(
            tuple(micro_batch(tensor, 0, num) if name in divided else tensor for name, tensor in named)
        )

    def divided_names(self) -> frozenset[str]:
        """The tensors that micro-batches divide: those whose leading size is the batch's. The others are used whole."""
        size, named = self.size(), zip(self.names, self.tensors, strict=True)
        return frozenset(
            name for name, tensor in named if tensor.dim() and tensor.shape[0] == size and name not in self.hashes
        )

    def signature(self) -> str:
        """``description`` as one line."""
        return "; ".join(f"{name}: {text}" for name, text in self.description().items())

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` in the places of this batch's own."""
        remaining = iter(tensors)

        def visit(_name: str, leaf: Any) -> Any:
            return next(remaining) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = self.call
        built = [_map(name, value, visit, []) for name, value in _names_and_values(args, kwargs)]
        return tuple(built[: len(args)]), dict(zip(kwargs, built[len(args) :], strict=True))


def micro_batch(tensor: torch.Tensor, part: int, num_parts: int) -> torch.Tensor:
    """Part ``part`` of ``num_parts`` equal ones of ``tensor`` along its first dimension: a view."""
    length = tensor.shape[0] // num_parts
    return tensor.narrow(0, part * length, length)


def _names_and_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for i, value in enumerate(args):
        yield f"batch[{i}]", value
    for keyword, value in kwargs.items():
        is_plain = keyword.isidentifier() and not (keyword == "batch" and args)
        yield keyword if is_plain else f"**[{keyword!r}]", value


def _map(name: str, value: Any, visit: Callable[[str, Any], Any], structure: list[str]) -> Any:
    """``value`` with every leaf replaced by ``visit(name, leaf)``; its containers are appended to ``structure``."""
    opened = None if isinstance(value, (torch.Tensor, *_PLAIN)) else _open(name, value)
    if opened is None:
        return visit(name, value)
    children, rebuild, static = opened
    structure.append(f"{name}: {type(value).__name__} of {len(children)}{static and f', {static}'}")
    return rebuild([_map(name + suffix, child, visit, structure) for suffix, child in children])


def _open(name: str, value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any], str] | None:
    """A container's children, each with its path, a function that rebuilds the container from other children, and a
    text for its static content besides its class."""
    own = id(value)  # no reference: pytree's functions refer to each other, and would keep the value for the collector
    paths, spec = flatten_with_paths(value, is_leaf=lambda inner: id(inner) != own)
    if not (len(paths) == 1 and paths[0][0] == ()):
        children = [(pytree.keystr(path), child) for path, child in paths]
        static = _suffixes(children) if type(value) in _BY_KEY else _context_text(name, value, spec.context)
        return children, lambda items: pytree.tree_unflatten(items, spec), static
    if isinstance(value, MutableMapping):
        keys = list(value)

        def copy_mapping(items: list[Any]) -> Any:
            mapping = copy.copy(value)
            for key, item in zip(keys, items, strict=True):
                mapping[key] = item
            return mapping

        children = [(f"[{key!r}]", value[key]) for key in keys]
        return children, copy_mapping, _suffixes(children)
    if is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value) if hasattr(value, entry.name)]

        def copy_dataclass(items: list[Any]) -> Any:
            instance = copy.copy(value)
            for field_name, item in zip(names, items, strict=True):
                object.__setattr__(instance, field_name, item)  # also where the class is frozen
            return instance

        return [(f".{field_name}", getattr(value, field_name)) for field_name in names], copy_dataclass, ""
    return None


def _suffixes(children: list[tuple[str, Any]]) -> str:
    return "".join(suffix for suffix, _ in children)


def _context_text(name: str, value: Any, context: Any) -> str:
    """Pytree's context of ``value``, besides its children, as a text that is equal on all ranks for equal contexts."""
    try:
        return "" if context is None else _text(context)
    except ValueError as error:
        raise UsageError(
            f"expected what a {type(value).__name__} has besides its children to print alike where it is alike, found "
            f"{error} in the pytree context of {name}: make it a child where it is a tensor, or else give its class a "
            f"__repr__ with what is in it"
        ) from None


def _text(static: Any) -> str:
    """A text that another process has, too.

    Raises:
        ValueError: there is none; says of what.
    """
    if isinstance(static, _PLAIN):
        return repr(static)
    if isinstance(static, torch.Tensor | np.ndarray):
        raise ValueError(f"a {type(static).__name__}, of which a part is printed,")
    if isinstance(static, type) or (
        isinstance(static, FunctionType | BuiltinFunctionType) and "<" not in static.__qualname__
    ):
        return f"{static.__module__}.{static.__qualname__}"
    if isinstance(static, Mapping):
        inside = [f"{_text(key)}: {_text(value)}" for key, value in static.items()]
    elif isinstance(static, list | tuple):
        inside = [_text(item) for item in static]
    elif isinstance(static, set | frozenset):
        inside = sorted(_text(item) for item in static)
    else:
        text = repr(static)
        if _ADDRESS.search(text):
            raise ValueError(text)
        return text
    return f"{type(static).__name__}({', '.join(inside)})"


def _describe(tensor: torch.Tensor) -> str:
    stride = "" if tensor.is_contiguous() else f" stride {list(tensor.stride())}"
    return f"{type_text(tensor)}{stride} on {tensor.device.type}"


def hash_of(tensor: torch.Tensor) -> str:
    """A hash (XXH3, 128 bits) of a tensor's values."""
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(data))
