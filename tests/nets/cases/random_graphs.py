"""Random graphs of three to eight operators, of which each has the scalar arguments that it can have."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_SIZES = (1, 2, 3, 5, 8, 17)
_FEWEST, _MOST = 3, 8  # operators of a graph


@dataclass(frozen=True)
class GraphCase:
    """The graph that follows from a seed."""

    seed: int

    @property
    def name(self) -> str:
        return f"graph {self.seed:04d}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[("float32", "float64", "float32", "bfloat16")[self.seed % 4]]


class Graph(nn.Module):
    """A graph as a module: it draws the same operators at each call. ``dtype``: what it computes in."""

    def __init__(self, case: GraphCase) -> None:
        super().__init__()
        self.case, self.dtype = case, case.dtype
        self.operands = nn.ParameterList()
        self.constants = nn.ParameterList()
        self.operators = Drawing(self, values=torch.Generator().manual_seed(case.seed)).run()[1]

    def results(self) -> tuple[Tensor, ...]:
        return Drawing(self).run()[0]

    def in_float64(self) -> Graph:
        """The same graph with the same values, computed in float64."""
        other = copy.deepcopy(self).double()
        other.dtype = torch.float64
        return other


class Drawing:
    """One run of a graph, in which operators are drawn and computed one after the other.

    Which come follows from the seed and from sizes and dtypes of values alone, so that every run is the same graph.
    ``values``: what operands are drawn from, where the graph has none yet.
    """

    def __init__(self, graph: Graph, values: torch.Generator | None = None) -> None:
        self.graph, self.dtype, self.is_wide = graph, graph.dtype, graph.case.dtype == torch.float64
        self.chance = random.Random(graph.case.seed)
        self.rows, self.columns = self.chance.choice(_SIZES), self.chance.choice(_SIZES)
        self._generator = values
        self._num_operands = self._num_constants = 0
        self._results: list[Tensor] = []
        self._unread: list[Tensor] = []

    def run(self) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
        """What nothing reads of the results, and the names of the operators."""
        from tests.nets.cases.graph_operators import OPERATORS, UNSTEADY

        names = [name for name in OPERATORS if self.graph.case.dtype != torch.bfloat16 or name not in UNSTEADY]
        drawn = self.chance.sample(names, self.chance.randint(_FEWEST, _MOST))
        for name in drawn:
            self._add(OPERATORS[name](self))
        return tuple(self._unread), tuple(drawn)

    def _add(self, result: Tensor) -> None:
        assert result.dtype == self.dtype, f"expected {self.dtype}, found {result.dtype}"
        self._results.append(result)
        self._unread.append(result)

    # What operators are given.

    def tensor(self, *shape: int) -> Tensor:
        """A floating-point tensor of this shape: a result, if there is one, or an operand in some layout."""
        fits = [each for each in self._results if each.shape == shape]
        if fits and self.chance.random() < 0.8:
            return self._read(self.chance.choice(fits))
        return self.operand(*shape)

    def any(self, dims: int = 1, most: int = 4) -> Tensor:
        """A floating-point tensor with so many dimensions: a result, if there is one."""
        fits = [each for each in self._results if dims <= each.dim() <= most]
        if fits and self.chance.random() < 0.85:
            return self._read(self.chance.choice(fits))
        sizes = (self.rows, self.columns) if dims <= 2 <= most else [self.size() for _ in range(dims)]
        return self.operand(*sizes)

    def like(self, x: Tensor) -> Tensor:
        """A tensor that can be broadcast to the shape of ``x``."""
        shape = [size if self.chance.random() < 0.75 else 1 for size in x.shape]
        return self.tensor(*shape[self.chance.randint(0, len(shape)) if self.chance.random() < 0.2 else 0 :])

    def operand(self, *shape: int) -> Tensor:
        """A parameter of this shape, of absolute values between 1/4 and 5/4, as it lies or turned, expanded or cut."""
        layout = self.chance.choice(("plain", "plain", "turned", "expanded", "cut"))
        if layout == "turned" and len(shape) > 1:
            return self._parameter(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        if layout == "expanded" and len(shape) > 1:
            return self._parameter(1, *shape[1:]).expand(shape)
        if layout == "cut" and shape:
            return self._parameter(*shape[:-1], 2 * shape[-1])[..., ::2]
        return self._parameter(*shape)

    def positive(self, *shape: int) -> Tensor:
        return self.operand(*shape).abs()

    def constant_operand(self, *shape: int) -> Tensor:
        """What is not trained, of the values of an operand."""
        shape = shape or (self.rows, self.columns)
        return self._constant(
            lambda: torch.rand(shape, generator=self._generator, dtype=torch.float64).to(self.dtype) + 0.25
        )

    def indices(self, shape: Sequence[int], below: int) -> Tensor:
        return self._constant(lambda: torch.randint(below, tuple(shape), generator=self._generator))

    def order(self, size: int) -> Tensor:
        """A permutation."""
        return self._constant(lambda: torch.randperm(size, generator=self._generator))

    def mask(self, *shape: int) -> Tensor:
        return self._constant(lambda: torch.rand(shape, generator=self._generator) < 0.6)

    def size(self) -> int:
        return self.chance.choice(_SIZES)

    def number(self) -> float:
        """A scalar argument, which may be one that says nothing, and may be a whole number."""
        return self.chance.choice((0.1, 0.5, 1.7, -0.6, -1.3, 2.5, 2, 3, -2, 1, 0))

    def positive_number(self) -> float:
        return self.chance.choice((0.1, 0.5, 0.9, 1, 1.7, 2, 3))

    def dim(self, x: Tensor) -> int:
        return self.chance.randrange(-x.dim(), x.dim())

    def dims(self, x: Tensor) -> list[int]:
        picked = self.chance.sample(range(x.dim()), self.chance.randint(1, x.dim()))
        return [dim - x.dim() * self.flag() for dim in picked]

    def flag(self) -> bool:
        return self.chance.random() < 0.5

    def pick(self, *options: Any) -> Any:
        return self.chance.choice(options)

    def draw(self, *options: Callable[[], Tensor]) -> Tensor:
        """What one of these gives."""
        return self.chance.choice(options)()

    def _read(self, value: Tensor) -> Tensor:
        self._unread = [each for each in self._unread if each is not value]
        return value

    def _parameter(self, *shape: int) -> Tensor:
        if self._generator is not None:
            size = torch.rand(shape, generator=self._generator, dtype=torch.float64) + 0.25
            sign = torch.randint(2, shape, generator=self._generator) * 2 - 1
            self.graph.operands.append(nn.Parameter((size * sign).to(self.dtype)))
        self._num_operands += 1
        operand: Tensor = self.graph.operands[self._num_operands - 1]
        return operand

    def _constant(self, make: Callable[[], Tensor]) -> Tensor:
        if self._generator is not None:
            self.graph.constants.append(nn.Parameter(make(), requires_grad=False))
        self._num_constants += 1
        constant: Tensor = self.graph.constants[self._num_constants - 1]
        return constant


Operator: TypeAlias = Callable[[Drawing], Tensor]
