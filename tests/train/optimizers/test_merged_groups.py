"""Groups that differ in numbers alone are stepped once for all, with the numbers that each has by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zerofx.optimizers import merged_groups
from zerofx.optimizers.outside import same
from zerofx.optimizers.replay import GroupNumbers, Replay
from zerofx.optimizers.shadow_optimizer import NextStep, ShadowOptimizer
from zerofx.optimizers.stand_in import StandIn

NUM_GROUPS, NUM_STEPS = 6, 9

Values = list[dict[str, Any]]


def lrs(**options: Any) -> Values:
    return [{"lr": 1e-3 * (index + 1), **options} for index in range(NUM_GROUPS)]


def betas() -> Values:
    return [{"lr": 1e-2, "betas": (0.9 - index / 64, 0.999), "weight_decay": 0.01} for index in range(NUM_GROUPS)]


def with_and_without_decay() -> Values:
    return [{"lr": 1e-3 * (index + 1), "weight_decay": 0.1 * (index % 2)} for index in range(NUM_GROUPS)]


CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Values, dict[str, Any], int]] = {
    "AdamW": (torch.optim.AdamW, lrs(), {}, 1),
    "AdamW on lists": (torch.optim.AdamW, lrs(), {"foreach": True}, 1),
    "AdamW, fused": (torch.optim.AdamW, lrs(), {"fused": True}, 1),
    "AdamW, betas": (torch.optim.AdamW, betas(), {}, 1),
    "AdamW, with and without decay": (torch.optim.AdamW, with_and_without_decay(), {}, 2),
    "Adam, amsgrad": (torch.optim.Adam, lrs(), {"amsgrad": True}, 1),
    "NAdam": (torch.optim.NAdam, lrs(), {}, 1),
    "RAdam": (torch.optim.RAdam, lrs(), {}, 1),
    "Adagrad": (torch.optim.Adagrad, lrs(lr_decay=0.1), {}, 1),
    "ASGD": (torch.optim.ASGD, lrs(), {}, NUM_GROUPS),  # its rates are tensors
    "SGD": (torch.optim.SGD, lrs(momentum=0.9), {}, 1),
}


def after(step: NextStep, stand_ins: list[StandIn]) -> list[StandIn]:
    """What the next step starts from."""
    starts = []
    for stand_in in stand_ins:
        update = step.updates[stand_in.key]
        singles = {spec.name: spec.dtype for spec in update.program.tensor_scalars if spec.name in update.present}
        flat = {spec.name: spec.dtype for spec in update.program.states if spec.name in update.present}
        scalars = tuple(update.scalars.items())
        starts.append(
            StandIn(
                stand_in.group, stand_in.dtype, tuple(flat.items()), scalars, tuple(singles.items()), stand_in.fused
            )
        )
    return starts


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_group_has_the_numbers_that_it_has_by_itself(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, groups, options, num_stepped = case
    parameters = [nn.Parameter(torch.ones(3)) for _ in groups]
    optimizer = kind([{"params": [p], **group} for p, group in zip(parameters, groups, strict=True)], **options)
    sizes: list[int] = []
    replay = Replay.numbers_of

    def counted(self: Replay, step: Any, shadow: torch.optim.Optimizer) -> Any:
        sizes.append(len(shadow.param_groups))
        return replay(self, step, shadow)

    monkeypatch.setattr(Replay, "numbers_of", counted)
    shadow = ShadowOptimizer(optimizer)
    starts = [StandIn(index, torch.float32, fused=bool(options.get("fused"))) for index in range(NUM_GROUPS)]
    for number in range(NUM_STEPS):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = groups[index]["lr"] / (1.0 + 0.3 * number + 0.01 * index)
        sizes.clear()
        step = shadow.next_step(starts)
        last = list(sizes)
        alone = ShadowOptimizer(optimizer).next_step(starts)
        for stand_in in starts:
            merged, own = step.updates[stand_in.key], alone.updates[stand_in.key]
            assert same([merged.numbers, merged.scalars], [own.numbers, own.scalars])
            assert all(type(value) in (int, float) for value in merged.numbers)
        assert same([change.value for change in step.changes], [change.value for change in alone.changes])
        starts = after(step, starts)
        for change in step.changes:
            change.swap()
    assert last == [num_stepped]


@pytest.mark.parametrize(
    "use",
    [float, int, bool, str, hash, round, lambda lr: lr > 0.15, lambda lr: {0.1: 1}[lr], lambda lr: lr.is_integer()],
)
def test_what_takes_several_numbers_for_one_is_another_course(use: Callable[[Any], Any]) -> None:
    def step(_: Any) -> None:
        use(GroupNumbers([0.1, 0.2]) if use is not bool else GroupNumbers([0.0, 0.2]))

    assert Replay([]).numbers_of(step, torch.optim.SGD([nn.Parameter(torch.ones(1))])) is None


def test_zeros_of_either_sign_are_two_numbers() -> None:
    values = merged_groups._merge([{"lr": 0.0}, {"lr": -0.0}])["lr"]
    assert type(values) is GroupNumbers
    assert [str(value) for value in values.values] == ["0.0", "-0.0"]
    exponents: Any = GroupNumbers([0.5, 0.25])
    assert (1.0 - exponents).values == [0.5, 0.75]
    assert (2.0**exponents).values == [2.0**0.5, 2.0**0.25]
