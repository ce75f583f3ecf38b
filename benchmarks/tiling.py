"""How large the inner size of an MLP may be within a budget of memory: whole, in tiles of rows, in slices of weights.

    python -m benchmarks.tiling

The budget is the least that a model of blocks with inner size ``--inner`` can be trained in without tiles. The inner
size is doubled for as long as it fits, without tiles and with them; the largest is then trained for a few steps, and
its peak measured. With many rows, and everything on the device, tiles save the values between operators. With few rows,
and parameters and optimizer states on the host, slices save the weights, their gradients and what updates hold.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zerofx
from zerofx.choices import OffloadOption, Tiling
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.units import format_bytes


class Block(nn.Module):
    """A pre-norm MLP with a residual."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.out = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.out(F.gelu(self.up(self.norm(x))))
        return result


class Blocks(nn.Module):
    """A few blocks; the loss is the mean of squares."""

    def __init__(self, dim: int, inner: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, inner) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


@dataclass(frozen=True)
class Case:
    """What takes the memory: ``rows`` of ``dim`` values in ``depth`` blocks, whose inner size begins at ``inner``."""

    name: str
    rows: int
    dim: int
    inner: int
    depth: int
    offload: OffloadOption

    def model(self, inner: int) -> nn.Module:
        return Blocks(self.dim, inner, self.depth)

    def plan(self, inner: int, budget: int, tile: Tiling) -> None:
        """Plan for that inner size; refused where ``budget`` bytes cannot be met."""
        model = self.model(inner)
        zerofx.plan(
            model, sgd(model), (torch.zeros(self.rows, self.dim),), machine="cpu", backend="eager",
            memory_budget=budget, tile=tile, offload=self.offload,
        )  # fmt: skip

    def fits(self, inner: int, budget: int, tile: Tiling) -> bool:
        """Whether a plan for that inner size meets ``budget`` bytes."""
        try:
            self.plan(inner, budget, tile)
        except MemoryBudgetError:
            return False
        return True

    def least_bytes(self) -> int:
        """The least budget without tiles."""
        try:
            self.plan(self.inner, 1, "none")
        except BudgetMissedError as refused:
            return int(refused.least_bytes)
        raise AssertionError("one byte is no budget that can be met")

    def largest(self, budget: int, tile: Tiling) -> int:
        """The largest inner size within ``budget``, doubling from the one that the budget was made for."""
        inner = self.inner
        while self.fits(2 * inner, budget, tile):
            inner *= 2
        return inner


def run(case: Case) -> list[list[object]]:
    """Rows of the table: whole, and as the budget asks; the largest model is trained and measured."""
    budget = case.least_bytes()
    whole, tiled = (case.largest(budget, tile) for tile in ("none", "auto"))
    model = case.model(tiled)
    step = zerofx.compile(model, sgd(model), machine="cpu", backend="eager", memory_budget=budget, offload=case.offload)
    x = torch.randn(case.rows, case.dim)
    losses = [float(step(x)) for _ in range(3)]
    measured = step.measure(x).peak_bytes["device"]
    how = "in slices" if step.plan.slices else "in tiles"
    print(f"{case.name}: losses of the largest, {how}: {', '.join(f'{loss:.4f}' for loss in losses)}")
    within = f"{case.name}, {format_bytes(budget)}"
    return [[within, "whole", whole, "", ""], [within, how, tiled, f"{tiled / whole:.0f}", format_bytes(measured)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = (
        Case("many rows", options.rows, options.dim, options.inner, options.depth, "none"),
        Case("few rows", 2, 8 * options.dim, 8 * options.inner, 1, "host"),
    )
    table = [row for case in cases for row in run(case)]
    headers = ["within", "", "largest inner size", "ratio", "measured peak"]
    print(tabulate(table, headers=headers, tablefmt="github"))


if __name__ == "__main__":
    main()
