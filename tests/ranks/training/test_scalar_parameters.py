"""Parameters of 0 dimensions, whose optimizer states all have shape []: trained, saved and loaded as by torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.lib.distributed import run_ranks
from tests.lib.runs.pairs import compile_eager
from tests.lib.runs.training import world

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05, foreach=False),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, foreach=False),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1, foreach=False),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=False),
}


class Scaled(nn.Module):
    """A learned scale beside a learned offset, of shape [4] or a single number too."""

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.offset = nn.Parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.logit_scale.exp() + self.offset).square().mean()


OFFSETS = {"beside [4]": torch.linspace(-1, 1, 4), "alone": torch.tensor(-0.3)}


def _train(name: str, offset: Tensor, stage: int) -> list[str]:
    """Training, a state saved and loaded between steps, and the same compiled again: what is not as without zerofx."""
    model, plain = Scaled(offset.clone()), Scaled(offset.clone())
    runner = DistributedDataParallel(plain) if world()[1] > 1 else plain
    optimizer, expected = OPTIMIZERS[name](model), OPTIMIZERS[name](plain)
    data = _batches()

    def both(count: int) -> None:
        for x in itertools.islice(data, count):
            step(x)
            expected.zero_grad()
            runner(x).backward()
            expected.step()

    def differences(when: str) -> Iterator[str]:
        found = step.full_state_dict() | _tensors(optimizer)
        wanted = dict(plain.state_dict()) | _tensors(expected)
        if found.keys() != wanted.keys():
            yield f"{when}: {found.keys() ^ wanted.keys()}"
            return
        yield from (f"{when}: {key}" for key in wanted if not _same(found[key], wanted[key]))

    step = compile_eager(model, optimizer, stage=stage)
    both(3)
    wrong = list(differences("trained"))
    saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(expected.state_dict())
    both(2)
    optimizer.load_state_dict(saved[0])
    expected.load_state_dict(saved[1])
    both(2)
    wrong += differences("loaded")
    step.close()
    step = compile_eager(model, optimizer, stage=stage)
    both(2)
    return [*wrong, *differences("compiled again")]


def _batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(world()[0])
    return (torch.randn(3, 4, generator=generator) for _ in itertools.count())


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, state in states.items() for name, value in state.items()}


def _same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and found.dtype == wanted.dtype and torch.equal(found, wanted)


def _train_all(stage: int) -> dict[str, list[str]]:
    cases = itertools.product(OPTIMIZERS, OFFSETS)
    return {f"{name}, {kind}": _train(name, OFFSETS[kind], stage) for name, kind in cases}


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_0_dim_parameters_train_save_load_and_compile_again_as_with_torch(name: str, kind: str) -> None:
    assert _train(name, OFFSETS[kind], 0) == []


def test_two_ranks_do_so_with_sharded_states() -> None:
    for found in run_ranks(_train_all, 2, 2):
        assert found == {f"{name}, {kind}": [] for name, kind in itertools.product(OPTIMIZERS, OFFSETS)}
