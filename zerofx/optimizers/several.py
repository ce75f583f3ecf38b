"""The optimizers that train one model, and the shadows that follow them from step to step. One is a list of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.averages import Average
from zerofx.errors import OptimizerError
from zerofx.optimizers.nested import NestedOptimizer, nest
from zerofx.optimizers.outside import may_change
from zerofx.optimizers.program import UpdateProgram
from zerofx.optimizers.shadow import make_averaging
from zerofx.optimizers.shadow_optimizer import NextStep, ShadowOptimizer
from zerofx.optimizers.stand_in import StandIn


@dataclass(frozen=True)
class Optimizers:
    """Optimizers of disjoint parameters, in the order in which they step; a single one is the only one.

    Param groups are counted through all of them. ``average``: of the parameters, which their updates keep as well.
    """

    each: tuple[torch.optim.Optimizer, ...]
    average: Average | None = None

    @staticmethod
    def from_user(given: Any, average: Average | None = None) -> Optimizers:
        """Those that the user gives: one, or a list of them.

        Raises:
            OptimizerError: there is none, or one is given twice.
        """
        each = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not each:
            raise OptimizerError("expected an optimizer, or a list of them, found an empty list: give at least one")
        if len(set(map(id, each))) < len(each):
            names = ", ".join(type(optimizer).__name__ for optimizer in each)
            raise OptimizerError(f"expected each optimizer once in a list of them, found one twice: {names}")
        return Optimizers(tuple(map(nest, each)), average)

    @functools.cached_property
    def steppers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those whose steps updates are: with the average of parameters as a state, if there is one."""
        return self.each if self.average is None else tuple([make_averaging(each, self.average) for each in self.each])

    @property
    def users(self) -> tuple[torch.optim.Optimizer, ...]:
        """The user's own."""
        return tuple(each.outer if isinstance(each, NestedOptimizer) else each for each in self.each)

    @property
    def name(self) -> str:
        """The names of their classes."""
        return " + ".join(type(optimizer).__name__ for optimizer in self.each)

    @property
    def kind(self) -> str:
        """Their classes, with the modules that these are in."""
        return " + ".join(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" for optimizer in self.each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, which are the optimizers' own dictionaries."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def places(self) -> list[tuple[int, int]]:
        """Of each group: the index of its optimizer, and its own index there."""
        return [(at, index) for at, optimizer in enumerate(self.each) for index in range(len(optimizer.param_groups))]

    def holders(self) -> dict[int, int]:
        """The index of the optimizer that has a parameter, by the parameter's identity."""
        groups = zip(self.places(), self.param_groups, strict=True)
        return {id(parameter): at for (at, _), group in groups for parameter in group["params"]}


class ShadowOptimizers:
    """Follows several optimizers: a ``ShadowOptimizer`` of each, for the stand-ins of its groups."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers.steppers
        self._each = [ShadowOptimizer(optimizer) for optimizer in optimizers.steppers]
        self._left_out: set[int] = set()

    def leave_out(self, at: int) -> None:
        """Follow one of them no more: it is run on whole parameters."""
        self._left_out.add(at)

    def next_step(self, stand_ins: Sequence[StandIn]) -> NextStep:
        """The coming step of all of them, as ``ShadowOptimizer.next_step`` gives one's.

        Raises:
            OptimizerError: one's does what cannot be done on flat shards, or changes an object that another has too.
        """
        steps = [shadow.next_step(mine) for shadow, mine in self._divide(stand_ins)]
        if len(self._each) > 1:
            self._check_apart(steps)
        updates = {key: update for step in steps for key, update in step.updates.items()}
        return NextStep(updates, [change for step in steps for change in step.changes])

    def programs(self, at: int, stand_ins: Sequence[StandIn]) -> dict[Any, UpdateProgram]:
        """The programs of the coming step of one of them, as ``ShadowOptimizer.programs`` gives them."""
        return self._each[at].programs(stand_ins)

    def forms(self, stand_in: StandIn, program: UpdateProgram) -> list[UpdateProgram]:
        """The updates that ``ShadowOptimizer.forms`` gives."""
        return self._each[stand_in.optimizer].forms(stand_in, program)

    def _check_apart(self, steps: Sequence[NextStep]) -> None:
        """Refuse a change of what another optimizer has too, which each of them would count on by itself."""
        followed = [optimizer for at, optimizer in enumerate(self._optimizers) if at not in self._left_out]
        for at, step in enumerate(steps):
            before = [(change.key, change.owner.get(change.key)) for change in step.changes]
            changed = {id(value): key for key, value in before if may_change(value)}
            for other in self._optimizers if changed else ():
                values = [value for entries in (vars(other), *other.param_groups) for value in entries.values()]
                shared = [changed[id(value)] for value in values if id(value) in changed]
                if shared and other is not followed[at]:
                    raise OptimizerError(
                        f"expected optimizers that share nothing that a step changes, found that the step of "
                        f"{type(followed[at]).__name__} changes its {shared[0]!r}, the same object as one of "
                        f"{type(other).__name__}'s: give each of them its own"
                    )

    def _divide(self, stand_ins: Sequence[StandIn]) -> list[tuple[ShadowOptimizer, list[StandIn]]]:
        followed = [(at, shadow) for at, shadow in enumerate(self._each) if at not in self._left_out]
        return [(shadow, [s for s in stand_ins if s.optimizer == at]) for at, shadow in followed]
