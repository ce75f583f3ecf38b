"""How large the inner size of an MLP may be within a budget of memory, whole and in tiles.

    python benchmarks/tiling.py

The budget is the least that a model of blocks with inner size ``--inner`` can be trained in without tiles. The inner
size is doubled for as long as it fits, without tiles and with them; the largest is then trained for a few steps, and
its peak measured. Parameters, gradients and optimizer states are in the budget: of all that grows with the inner size,
tiles save the values between operators only.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zerofx
from zerofx.errors import MemoryBudgetError
from zerofx.options import Tiling
from zerofx.report.units import format_bytes
from zerofx.scheduler.budget import BudgetMissedError


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


def fits(options: argparse.Namespace, inner: int, budget: int, tile: Tiling) -> bool:
    """Whether a plan for that inner size meets ``budget`` bytes."""
    model = Blocks(options.dim, inner, options.depth)
    try:
        zerofx.plan(
            model, sgd(model), (batch(options),), machine="cpu", backend="eager", memory_budget=budget, tile=tile
        )
    except MemoryBudgetError:
        return False
    return True


def least_bytes(options: argparse.Namespace) -> int:
    """The least budget without tiles."""
    model = Blocks(options.dim, options.inner, options.depth)
    try:
        zerofx.plan(model, sgd(model), (batch(options),), machine="cpu", backend="eager", memory_budget=1, tile="none")
    except BudgetMissedError as refused:
        return int(refused.least_bytes)
    raise AssertionError("one byte is no budget that can be met")


def batch(options: argparse.Namespace) -> Tensor:
    return torch.zeros(options.rows, options.dim)


def largest(options: argparse.Namespace, budget: int, tile: Tiling) -> int:
    """The largest inner size within ``budget``, doubling from the one that the budget was made for."""
    inner: int = options.inner
    while fits(options, 2 * inner, budget, tile):
        inner *= 2
    return inner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    budget = least_bytes(options)
    whole, tiled = (largest(options, budget, tile) for tile in ("none", "auto"))
    model = Blocks(options.dim, tiled, options.depth)
    step = zerofx.compile(model, sgd(model), machine="cpu", backend="eager", memory_budget=budget)
    x = torch.randn(options.rows, options.dim)
    losses = [float(step(x)) for _ in range(3)]
    measured = step.measure(x).peak_bytes["device"]
    rows = [["whole", whole, "", ""], ["in tiles", tiled, f"{tiled / whole:.0f}", format_bytes(measured)]]
    headers = [f"within {format_bytes(budget)}", "largest inner size", "ratio", "measured peak"]
    print(tabulate(rows, headers=headers, tablefmt="github"))
    print(f"losses of the largest: {', '.join(f'{loss:.4f}' for loss in losses)}")


if __name__ == "__main__":
    main()
