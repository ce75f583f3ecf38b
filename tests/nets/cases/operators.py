"""Models of one operator each, made of torch's own database of operators and its samples of their arguments."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_ELEMENTS = 1 << 16  # of a sample's tensors together: operators of a few milliseconds
_NUM_SAMPLES = 3
_SEEDER = "wrapper_set_seed"  # what the database calls an operator with

Factors = list[Tensor | None]


@dataclass(frozen=True)
class OperatorCase:
    """An entry of the database, in one dtype."""

    name: str
    dtype: str


def operator_cases() -> list[OperatorCase]:
    """Every entry that has a derivative in the dtype on a CPU."""
    return [
        OperatorCase(name, label)
        for label, dtype in DTYPES.items()
        for name, op in _entries().items()
        if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") & op.supported_dtypes("cpu")
    ]


@cache
def _entries() -> dict[str, Any]:
    return {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db}


@dataclass(frozen=True)
class OperatorSample:
    """Arguments of an operator.

    Attributes:
        operator: called as ``operator(first, *args, **kwargs)``.
        process: what makes of its result that whose gradient is determined: the absolute values of singular vectors.
        arguments: ``(first, args, kwargs)``.
        copied: whether the operator reads copies of parameters and buffers, not these themselves.
        adam: whether it is trained with Adam, not with SGD and momentum.
    """

    operator: Callable[..., Any]
    process: Callable[[Any], Any]
    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]
    copied: bool
    adam: bool

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer, whose states have the bits of the gradients."""
        if self.adam:
            return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    def model(self) -> OperatorModel:
        """A fresh model, with the same values every time."""
        return OperatorModel(self)

    def factors(self) -> Factors:
        """What the differentiable results are multiplied by, of their shapes; None for the others.

        Raises:
            Exception: the operator does not take these arguments.
        """
        generator = torch.Generator().manual_seed(11)
        torch.manual_seed(3)
        return [
            torch.rand(_real(leaf).shape, generator=generator) + 0.5 if leaf.requires_grad else None
            for leaf in self.model().results()
        ]


class OperatorModel(nn.Module):
    """The sum of an operator's differentiable results, each element times a factor of its own.

    Arguments that have a gradient are parameters, other tensors are buffers.
    """

    def __init__(self, sample: OperatorSample) -> None:
        super().__init__()
        self._sample = (sample,)
        leaves, self._structure = pytree.tree_flatten(sample.arguments)
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        for number, tensor in enumerate(tensors):
            value = tensor.detach().clone()
            if tensor.requires_grad:
                self.register_parameter(f"argument{number}", nn.Parameter(value))
            else:
                self.register_buffer(f"argument{number}", value)
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        # A name where the argument is a tensor, and the argument in a tuple where it is none.
        self._leaves = [f"argument{places[id(leaf)]}" if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def results(self) -> list[Tensor]:
        """The tensors that the operator returns."""
        sample = self._sample[0]
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        if sample.copied:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        leaves = [tensors[leaf] if isinstance(leaf, str) else leaf[0] for leaf in self._leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        result = sample.process(sample.operator(first, *args, **kwargs))
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    def forward(self, factors: Factors) -> Tensor:
        total = torch.zeros(())
        for leaf, factor in zip(self.results(), factors, strict=True):
            if factor is not None:
                total = total + (_real(leaf).to(torch.float32) * factor).sum()
        return total


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def samples(case: OperatorCase) -> Iterator[OperatorSample]:
    """Some samples of an operator: the largest, and others that a seed made of its name picks.

    The first reads parameters, the second copies of them, and the third changes a copy in place where it can.
    """
    op = _entries()[case.name]
    seed = zlib.crc32(case.name.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    usable = [sample for sample in op.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=True) if _usable(sample)]
    largest = max(usable, key=_num_elements, default=None)
    others = [sample for sample in usable if sample is not largest]
    picked = random.Random(seed).sample(others, min(_NUM_SAMPLES - 1, len(others)))
    for number, sample in enumerate([] if largest is None else [largest, *picked]):
        arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
        in_place = number == 2 and op.supports_inplace_autograd and op.inplace_variant and not sample.broadcasts_input
        operator = _unseeded(op.inplace_variant if in_place else op.op)
        # Not SGD in lower dtypes, whose a + alpha * b rounds the last values of a tensor otherwise than those before.
        adam = number == 1 or case.dtype != "float32"
        yield OperatorSample(operator, sample.output_process_fn_grad, arguments, copied=number > 0, adam=adam)


def _unseeded(operator: Callable[..., Any]) -> Callable[..., Any]:
    """What draws at random draws from the generator as it is: the database seeds it within the call."""
    if not isinstance(operator, FunctionType) or _SEEDER not in operator.__code__.co_names:
        return operator
    namespace = operator.__globals__ | {_SEEDER: lambda inner, *args, **kwargs: inner(*args, **kwargs)}
    copied = FunctionType(operator.__code__, namespace, None, operator.__defaults__, operator.__closure__)
    copied.__kwdefaults__ = operator.__kwdefaults__
    return copied


def _usable(sample: Any) -> bool:
    tensors = _tensors(sample)
    has_gradient = any(tensor.requires_grad for tensor in tensors)
    return has_gradient and all(tensor.numel() for tensor in tensors) and _num_elements(sample) <= _MOST_ELEMENTS


def _num_elements(sample: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(sample))


def _tensors(sample: Any) -> Sequence[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
