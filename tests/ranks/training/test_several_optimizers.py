"""Several optimizers of one model: the bits of stepping each of them in turn, on any ranks and at any stage."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Case, batches
from tests.lib.optimizers import CountingAdam
from tests.lib.runs.training import Trained, build, differences, train_compiled, train_plain

CASE, STEPS = CASES["stack"], 6
FAR = 1e6  # a norm that no gradients have
ROUNDING = 1e-6  # torch's norm sums in another order
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.3},
    "accumulated, recomputed, with a norm": {
        "accumulate": 2,
        "reduce": "once",
        "max_grad_norm": FAR,
        "recompute": "full",
    },
}


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW in two groups, one of them inside layers, SGD with momentum, and one that counts in Python."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    half, third = len(matrices) // 2, len(biases) // 3
    groups: list[dict[str, Any]] = [
        {"params": matrices[:half]},
        {"params": biases[:third], "lr": 0.003, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=0.01, foreach=False),
        torch.optim.SGD(matrices[half:], lr=0.05, momentum=0.9, foreach=False),
        CountingAdam(biases[third:]),
    ]


class InTurn:
    """Steps several optimizers in turn, as loops do."""

    def __init__(self, model: nn.Module) -> None:
        self.each = several(model)

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()


def _case(make: Callable[[nn.Module], Any]) -> Case:
    return replace(CASE, optimizer=make)


def _compare(stage: int, way: str) -> list[str]:
    options = WAYS[way]
    plain = {key: options[key] for key in ("accumulate", "max_grad_norm") if key in options}
    expected = train_plain(_case(InTurn), STEPS, **plain)
    trained = train_compiled(_case(several), stage, STEPS, **options)
    clips = options.get("max_grad_norm", FAR) < FAR
    assert not clips or min(expected.norms) > options["max_grad_norm"]
    wrong = differences(expected, trained, ROUNDING if clips else 0.0)
    return [each for each in wrong if clips or not each.startswith("norm ")]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_one_process_has_the_bits_of_stepping_each_in_turn(stage: int, way: str) -> None:
    assert _compare(stage, way) == []


@pytest.mark.days(3)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_have_the_bits_of_distributed_data_parallel_with_each_stepped_in_turn(stage: int, way: str) -> None:
    assert run_ranks(_compare, 2, stage, way) == [[], []]


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[at::2], lr=0.01, foreach=False) for at in (0, 1)]


def _compare_with_one(stage: int, options: dict[str, Any]) -> list[str]:
    """Two of a kind train as one does, whose bits in these options are held elsewhere."""
    expected, trained = (train_compiled(case, stage, STEPS, **options) for case in (CASE, _case(_two)))
    return differences(expected, trained)


@pytest.mark.days(3)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_of_a_kind_have_the_bits_of_one(num_ranks: int, stage: int, accumulate: int) -> None:
    options = {"precision": "bf16", "accumulate": accumulate}
    assert run_ranks(_compare_with_one, num_ranks, stage, options) == [[]] * num_ranks


def _clip_on_all_stages() -> list[list[str]]:
    options = {"max_grad_norm": 0.3, "precision": "bf16"}
    first, *others = (train_compiled(_case(several), stage, STEPS, **options) for stage in (0, 1, 3))
    return [differences(first, other) for other in others]


@pytest.mark.days(3)
def test_gradients_of_all_are_clipped_by_one_norm_at_every_stage() -> None:
    assert run_ranks(_clip_on_all_stages, 2) == [[[], []]] * 2


# ------------------------------------------------------------------------------------ saved, and resumed


Outcome = tuple[Trained, list[dict[str, Any]], list[dict[str, Any]]]


def _schedulers(optimizers: list[torch.optim.Optimizer]) -> list[LRScheduler]:
    return [StepLR(optimizer, 1 + at, 0.8 - 0.1 * at) for at, optimizer in enumerate(optimizers)]


def _train(first: int, last: int, stage: int, load: str = "", save: str = "") -> Outcome:
    """Train steps of the same batches on all ranks, whose mean gradients are then those of one process."""
    model = build(CASE)
    optimizers = several(model)
    schedulers = _schedulers(optimizers)
    step = zerofx.compile(model, optimizers, stage, backend="eager")
    if load:
        step.load_checkpoint(load, state={f"scheduler {at}": each for at, each in enumerate(schedulers)})
    losses = []
    for args, kwargs in itertools.islice(batches(CASE, 0, last), first, None):
        losses.append(step(*args, **kwargs).clone())
        for scheduler in schedulers:
            scheduler.step()
    if save:
        step.save_checkpoint(save, state={f"scheduler {at}": each for at, each in enumerate(schedulers)})
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    state = step.full_state_dict()
    step.close()
    given_back = [optimizer.state_dict() for optimizer in optimizers]
    return Trained(losses, state), states, given_back


def _train_eagerly(last: int) -> tuple[Trained, list[dict[str, Any]]]:
    model = build(CASE)
    optimizers = InTurn(model)
    schedulers = _schedulers(optimizers.each)
    losses = []
    for args, kwargs in batches(CASE, 0, last):
        optimizers.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        optimizers.step()
        losses.append(loss.detach())
        for scheduler in schedulers:
            scheduler.step()
    return Trained(losses, model.state_dict()), [optimizer.state_dict() for optimizer in optimizers.each]


def _check(found: list[Outcome], first: int, last: int) -> None:
    expected, states = _train_eagerly(last)
    expected = replace(expected, losses=expected.losses[first:])
    for trained, own, given_back in found:
        assert differences(expected, trained) == []
        for each in (own, given_back):
            assert [state["param_groups"] for state in each] == [state["param_groups"] for state in states]
            for mine, theirs in zip(each, states, strict=True):
                torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("before", "after"), [((1, 0), (2, 3)), ((2, 3), (1, 1)), ((2, 1), (2, 0))])
def test_each_goes_on_from_a_checkpoint_of_other_ranks_and_another_stage(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    place = str(tmp_path / "checkpoint")
    found = run_ranks(_train, before[0], 0, 3, before[1], "", place)
    _check(found, 0, 3)
    _check(run_ranks(_train, after[0], 3, STEPS, after[1], place), 3, STEPS)
