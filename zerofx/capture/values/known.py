"""Values that a traced forward may read: those that depend on no input, parameter, buffer or random number.

A step is one graph for all values of its inputs, so fake tensors have none. The values of ``torch.arange(2, n)`` are
the same in every step, though, and so are those of arguments that ``constant=`` names: the value of each such fake
tensor is kept next to it, computed as eager mode would, and returned to whoever reads it. An operator whose result's
shape depends on such values gives a constant of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.ir.operators.operator import OperatorKind, Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.dispatch import TorchDispatchMode, without_modes
from zerofx.torch_private.operators import OpOverload, pytree, schema_of
from zerofx.torch_private.tensors import FunctionalTensor, is_functional

MOST_ELEMENTS = 1 << 18
"""The elements that a value has at most: what Python looks at is small, and each value is computed next to a trace."""
_GROWTH = 8  # what follows from values that are given has at most so many times their elements

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
_PLAIN = (torch.Tensor, nn.Parameter)


class KnownValues(TorchDispatchMode):
    """While active, keeps the values of tensors that follow from constants alone, and returns them when read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._values: Any = WeakIdKeyDictionary()
        self._checked: Any = WeakIdKeyDictionary()
        self._answer: Callable[[torch.Tensor, bool], Any] | None = None
        self._overwritten: list[torch.Tensor] = []  # values whose memory has been given something unknown
        self._most_elements = MOST_ELEMENTS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = pytree.tree_flatten((args, kwargs))
        values = self._substitute_values(func, flat)
        if values is None and func is _READ and self._answer is not None:
            answer = self._answer(args[0], args[0] in self._checked)
            if answer is not None:
                return answer
        if values is not None and torch.Tag.data_dependent_output in func.tags:
            return self._compute(func, values, spec)
        if values is not None and torch.Tag.dynamic_output_shape in func.tags:
            where = next(arg.device for arg in flat if isinstance(arg, torch.Tensor))
            results = self._compute(func, values, spec)
            return pytree.tree_map_only(torch.Tensor, lambda result: self._constant(result, where), results)
        if facts_of(func).kind is OperatorKind.INDEXED:
            args = (args[0], self._masks_to_indices(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if func is _aten._is_all_true.default:  # which ``torch._check_tensor_all`` calls, and nobody else
            self._checked[out] = None
        if values is None:
            self._forget_written(func, args, kwargs)
            return out
        results = self._compute(func, values, spec)
        for tensor, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(results), strict=True):
            if isinstance(tensor, torch.Tensor) and value.numel() <= self._most_elements:
                self._keep(tensor, value)
        return out

    @contextlib.contextmanager
    def answer_reads(self, answer: Callable[[torch.Tensor, bool], Any]) -> Iterator[None]:
        """While open, ``answer`` decides reads of one-element tensors without a known value; None: refuse.

        It is given the tensor, and whether the read only asserts that it holds.
        """
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Make ``fake`` stand for ``real``, whose values are the same in every step."""
        with without_modes():
            value = real.detach().to("cpu", fake.dtype, copy=True)
        self._most_elements = max(self._most_elements, _GROWTH * value.numel())
        self._keep(fake, value)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of ``tensor``, if it is known; not to be written to."""
        known: torch.Tensor | None = self._values.get(tensor)
        if known is None and self._is_real(tensor) and tensor.numel() <= self._most_elements:
            with without_modes():
                known = self._values[tensor] = tensor.detach().to("cpu", copy=True)
        if known is not None and any(_same_memory(known, other) for other in self._overwritten):
            return None
        return known

    def _substitute_values(self, func: Any, flat: list[Any]) -> list[Any] | None:
        """The arguments with values instead of tensors, or None if the result of ``func`` is not known."""
        traffic = facts_of(func).traffic
        if not isinstance(func, OpOverload) or func.namespace != "aten" or traffic is Traffic.ALLOCATES:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        arguments: list[Any] = []
        for arg in flat:
            if isinstance(arg, torch.Tensor):
                known = self.value(arg)
                if known is None and traffic is Traffic.FILLS and arg.numel() <= self._most_elements:
                    with without_modes():
                        known = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cpu")
                if known is None:
                    return None
                arg = known
            elif isinstance(arg, torch.device):
                arg = torch.device("cpu")  # values are the same on every device, and its own may be absent
            arguments.append(arg)
        return arguments

    def _compute(self, func: Any, values: list[Any], spec: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(values, spec)
        with without_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def _masks_to_indices(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replace masks whose values are known by indices, as eager mode's kernels do."""
        numbered: list[torch.Tensor | None] = []
        for index in indices:
            mask = self.value(index) if index is not None and index.dtype in (torch.bool, torch.uint8) else None
            if index is None or mask is None:
                numbered.append(index)
                continue
            with without_modes():
                numbers = mask.nonzero().unbind(1)
            numbered += [self._constant(number.contiguous(), index.device) for number in numbers]
        return numbered

    def _constant(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        with without_modes():
            placed = value.to(device)
        constant: torch.Tensor = _aten.lift_fresh.default(placed)
        with without_modes():  # the values, not a fake tensor
            self._keep(constant, value.clone())
        return constant

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._values[tensor] = value
        if isinstance(tensor, FunctionalTensor):  # whose ``tolist`` reads what it is made around
            self._values[tensor.elem] = value

    def _is_real(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in _PLAIN and not tensor.is_meta and not is_functional(tensor)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that a call with unknown results has written to."""
        schema = schema_of(func) if isinstance(func, OpOverload) else None
        if schema is not None and not schema.is_mutable:
            return
        written: Any = (args, kwargs)
        if schema is not None:
            places = [
                (argument.name, i)
                for i, argument in enumerate(schema.arguments)
                if argument.alias_info and argument.alias_info.is_write
            ]
            written = [args[i] if i < len(args) else kwargs.get(name) for name, i in places]
        for arg in pytree.tree_leaves(written):
            if isinstance(arg, torch.Tensor) and (value := self._values.get(arg)) is not None:
                self._overwritten.append(value)


def _same_memory(first: torch.Tensor, other: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
