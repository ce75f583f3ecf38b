"""The same training twice: by zerofx, and in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zerofx
from tests.lib.users import adamw, eager_step, ids, same_parameters, tiny
from zerofx import Step

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def compile_eager(model: Any, optimizer: Any, **options: Any) -> Step:
    return zerofx.compile(model, optimizer, backend="eager", **options)


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


class Pair:
    """The same training twice: by zerofx, and in eager mode."""

    def __init__(self, optimizer: OptimizerOf = adamw, **options: Any) -> None:
        self.model, self.plain = tiny(), tiny()
        self.optimizers = [optimizer(self.model), optimizer(self.plain)]
        self.step = compile_eager(self.model, self.optimizers[0], **options)
        self.count = 0

    def train(self, steps: int = 1, rows: int = 2) -> None:
        """Steps whose losses are equal bit for bit."""
        for _ in range(steps):
            self.count += 1
            x, y = ids(self.count, rows), ids(-self.count, rows)
            loss = self.step(x, labels=y)
            assert torch.equal(loss, eager_step(self.plain, self.optimizers[1], x, labels=y))
            assert not loss.requires_grad

    def set(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(options)

    def same(self) -> bool:
        with self.step.full_parameters():
            return same_parameters(self.model, self.plain)
