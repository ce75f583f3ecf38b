"""Do recorded steps again once for all groups that differ in numbers alone, such as learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from zerofx.optimizers.outside import PLAIN, OptimizerRest, same
from zerofx.optimizers.replay import GroupNumbers
from zerofx.optimizers.stand_in import Repeated, StandIn, StandInOutcome, StandInStep

Alike = tuple[tuple[int, ...], ...]


def groups_alike(steps: Sequence[StandInStep], stand_ins: Sequence[StandIn]) -> Alike:
    """The groups that start alike, by what their stand-ins start from and the operators of their steps."""
    of_group: dict[int, list[Any]] = {}
    for step, stand_in in zip(steps, stand_ins, strict=True):
        of_group.setdefault(stand_in.group, []).append((step.operators, stand_in.key[1:]))
    alike: dict[Any, list[int]] = {}
    for group, starts in of_group.items():
        alike.setdefault(tuple(starts), []).append(group)
    return tuple(map(tuple, alike.values()))


class MergedGroups:
    """Recorded steps that are done again once for all groups of each tuple in ``alike``.

    ``is_right``: they are known to give what the steps of single groups give.
    """

    def __init__(self, steps: list[StandInStep], alike: Alike) -> None:
        self.steps, self.alike, self.is_right = steps, alike, False
        # Of each group: the tuple that it is in, and its place there.
        self._place = {group: (index, at) for index, groups in enumerate(alike) for at, group in enumerate(groups)}
        self._repeated: Repeated | None = None

    def outcomes(self, state: OptimizerRest, stand_ins: Sequence[StandIn]) -> list[StandInOutcome] | None:
        """The outcomes of ``Repeated.outcomes``; None also if groups that are alike take different courses."""
        place = self._place
        if len(self.alike) == len(place):
            return None
        first = [index for index, stand_in in enumerate(stand_ins) if place[stand_in.group][1] == 0]
        if self._repeated is None:
            self._repeated = Repeated([self.steps[index] for index in first])
        own = [replace(stand_ins[index], group=place[stand_ins[index].group][0]) for index in first]
        try:
            merged = tuple(_merge([state.groups[group] for group in groups]) for groups in self.alike)
            outcomes = self._repeated.outcomes(replace(state, groups=merged), own)
            if outcomes is None or not same(outcomes[0].attributes, state.attributes):
                return None
            of_merged: dict[int, list[StandInOutcome]] = {}
            for stand_in, outcome in zip(own, outcomes, strict=True):
                of_merged.setdefault(stand_in.group, []).append(outcome)
            left = {group: iter(of_merged[index]) for group, (index, _) in place.items()}
            return [_group_facts(next(left[each.group]), place[each.group][1]) for each in stand_ins]
        except ValueError:
            return None


def same_outcomes(outcomes: Sequence[StandInOutcome] | None, expected: Sequence[StandInOutcome]) -> bool:
    """True if steps that were done in two ways leave the same."""
    return outcomes is not None and all(
        same([a.numbers, a.scalars, a.group, a.attributes], [b.numbers, b.scalars, b.group, b.attributes])
        for a, b in zip(outcomes, expected, strict=True)
    )


def _group_facts(outcome: StandInOutcome, at: int) -> StandInOutcome:
    numbers, scalars, group = _pick(outcome.numbers, at), _pick(outcome.scalars, at), _pick(outcome.group, at)
    return StandInOutcome(numbers, scalars, group, outcome.attributes)


def _merge(values: Sequence[Any]) -> Any:
    """One value for those of several groups: what all have, or their numbers; ``_pick`` gives one group's.

    Raises:
        ValueError: they differ otherwise.
    """
    first, kind = values[0], type(values[0])
    if all(value is first for value in values):
        return first
    if all(type(value) is kind for value in values):
        if kind in (int, float):
            alike = all(value == first and math.copysign(1.0, value) == math.copysign(1.0, first) for value in values)
            return first if alike else GroupNumbers(list(values))
        if kind in (tuple, list) and all(len(value) == len(first) for value in values):
            return kind(map(_merge, zip(*values, strict=True)))
        if kind is dict and all(value.keys() == first.keys() for value in values):
            return {key: _merge([value[key] for value in values]) for key in first}
        if kind in PLAIN and all(value == first for value in values):
            return first
    raise ValueError


def _pick(value: Any, at: int) -> Any:
    """The value of one group."""
    kind = type(value)
    if kind is GroupNumbers:
        return value.values[at]
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()  # which each group may write to
    if kind in (tuple, list):
        return kind([_pick(item, at) for item in value])
    if kind is dict:
        return {key: _pick(item, at) for key, item in value.items()}
    raise ValueError
