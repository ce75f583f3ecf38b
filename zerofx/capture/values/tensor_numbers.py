"""Numbers of tensors by how they were computed: what a forward computes is told from what it would else.

Two runs of a forward give a result the same number if the same operators made it of equal values. What Python makes a
tensor of counts by its values; memory that is written into counts for all tensors in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from zerofx.torch_private.dispatch import TorchDispatchMode, without_modes
from zerofx.torch_private.operators import pytree, schema_of
from zerofx.torch_private.tensors import is_traced, memory_of, version_of

Number = int

ANY_NUMBER = hash("number")  # of those that a step has as inputs, and of those that Python computes with
PLAIN = (bool, int, float, str, type(None))


def tensors_of_tree(outputs: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


class Numbers(TorchDispatchMode):
    """The numbers of tensors: equal for tensors that are computed alike from equal ones."""

    def __init__(self, has_inputs: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._has_inputs = has_inputs
        self._known: dict[int, tuple[Number, int, torch.Tensor]] = {}  # with the version that it is of, and what it is
        self._written: dict[Any, Number] = {}  # of memory, the number of all that was written into it
        self._others, self._num_random = itertools.count(), 0
        self._read_by: dict[Number, tuple[Number, ...]] = {}  # of each number, those that it was computed from

    def sources(self, numbers: Sequence[Number]) -> set[Number]:
        """``numbers``, and all that they were computed from."""
        sources, pending = set[Number](), list(numbers)
        while pending:
            number = pending.pop()
            if number not in sources:
                sources.add(number)
                pending += self._read_by.get(number, ())
        return sources

    def put(self, tensor: torch.Tensor, number: Number) -> None:
        self._known[id(tensor)] = number, version_of(tensor), tensor

    def number(self, tensor: torch.Tensor) -> Number:
        """The number of a tensor as it is now."""
        if id(tensor) not in self._known:
            self.put(tensor, self._number_of_other(tensor))
        number, version, _ = self._known[id(tensor)]
        if version_of(tensor) == version:
            return number
        written = self._written.get(memory_of(tensor), 0)
        later = hash((number, version_of(tensor) - version, written))
        self._read_by[later] = (number, written)
        return later

    def _number_of_other(self, tensor: torch.Tensor) -> Number:
        """The number of a tensor that no operator has made: by its values where it has some, which may be what was
        read."""
        if is_traced(tensor):
            return hash((next(self._others), tuple(tensor.shape)))
        with without_modes():
            values = tensor.detach().to(device="cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
            return hash((tensor.dtype, tuple(tensor.shape), values.numpy().tobytes()))

    def number_of_inputs(self, args: Any, kwargs: Any) -> Number:
        """The number of all that a module is called with, as far as it has one."""
        leaves = pytree.tree_leaves((args, kwargs))
        return hash(tuple(self._leaf(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, *PLAIN))))

    def settle(self, tensor: torch.Tensor) -> Number:
        """The number of a tensor as it is now, which it keeps."""
        number = self.number(tensor)
        self.put(tensor, number)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        leaves = [self._leaf(leaf) for leaf in given]
        read = tuple(number for leaf, number in zip(given, leaves, strict=True) if isinstance(leaf, torch.Tensor))
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_random += 1
            leaves.append(self._num_random)
        number = hash((str(func), *leaves))
        arguments = schema_of(func).arguments
        by_name = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_of_tree(by_name.get(argument.name)):  # and so has all that shares its memory
                    memory = memory_of(tensor)
                    written = self._written[memory] = hash((self._written.get(memory), number))
                    self._read_by[written] = read
        for index, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                self.put(leaf, hash((number, index)))
                self._read_by[hash((number, index))] = read
        return out

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.number(leaf)
        if self._has_inputs and type(leaf) in (int, float):
            return ANY_NUMBER
        is_plain = isinstance(leaf, (*PLAIN, complex, torch.dtype, torch.device, torch.layout, torch.memory_format))
        return repr(leaf) if is_plain else type(leaf).__name__  # a process group has no text of its own
