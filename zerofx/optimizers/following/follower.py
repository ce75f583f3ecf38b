"""Follow an optimizer: before each training step, run its own ``step`` on stand-ins and use what that did.

``zerofx.optimizers.update`` writes a function for the scalars of an update, once. Where it cannot (the step counts in a
group or an attribute, goes through ``math`` or numpy, decides by what it has counted), the step is run on a stand-in
for each group and dtype (``zerofx.optimizers.following.stand_in``) before every step: this gives the operators of the
coming update, which choose the program, the numbers that go with them, and the values that the step leaves in groups
and attributes.

A program is used only after it has been compared, bit for bit and for several steps ahead, with the optimizer itself on
tensors of other sizes, all groups together and two parameters in each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import looks_at_shapes, not_elementwise
from zerofx.optimizers.build import build_graph
from zerofx.optimizers.following.side_by_side import ComingUpdate, SideBySide
from zerofx.optimizers.following.stand_in import Skeleton, StandIn, StandInOutcome, run_on_stand_in
from zerofx.optimizers.outside import Change, OptimizerRest, changes, outside, same
from zerofx.optimizers.program import UpdateProgram
from zerofx.optimizers.scalars import Heard
from zerofx.optimizers.support import refuse_by_name, refuse_dtype
from zerofx.optimizers.trace import SHAPES, Trace

# What is compiled is a program for each form of the update: an update that counts what it calls has one a step.
_MOST_PROGRAMS: Final = 8


@dataclass(frozen=True)
class NextStep:
    """The coming step: the update of each stand-in by its key, and what the step changes besides the states."""

    updates: dict[Any, ComingUpdate]
    changes: list[Change]


@dataclass(frozen=True)
class _Known:
    program: UpdateProgram
    heard: tuple[int, ...]


class Follower:
    """Follows one optimizer. It is neither stepped nor changed, but for what ``NextStep.changes`` are swapped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, _Known] = {}
        self._programs: dict[Any, UpdateProgram] = {}
        self._fills: dict[tuple[int, str], float | None] = {}
        self._compared: set[Any] = set()
        self.changes_outside = False
        """Whether a step that was looked at changes more than states: what it counts is out of a function's reach."""

    def next_step(self, stand_ins: Sequence[StandIn]) -> NextStep:
        """The coming step from what the optimizer's groups and attributes say now.

        Raises:
            OptimizerError: the step does what cannot be done on flat shards.
        """
        state = outside(self._optimizer)
        updates, after = self._step(stand_ins, state)
        changed: list[Change] = []
        for group, before, values in zip(self._optimizer.param_groups, state.groups, after.groups, strict=True):
            changed += changes(group, before, values)
        changed += changes(vars(self._optimizer), state.attributes, after.attributes)
        return NextStep(updates, changed)

    def programs(self, stand_ins: Sequence[StandIn], steps_ahead: int = 12) -> dict[Any, UpdateProgram]:
        """The programs of the coming step by the stand-ins' keys, compared with the optimizer itself.

        Programs that have not been compared yet are, for ``steps_ahead`` steps from here: what comes up later than that
        is compared when it does.

        Raises:
            OptimizerError: the update cannot run on flat shards, or hides what it depends on; nothing has changed.
        """
        for group in self._optimizer.param_groups:
            refuse_by_name(self._optimizer, group)
        for stand_in in stand_ins:
            refuse_dtype(stand_in.dtype)
        step = self.next_step(stand_ins)
        programs = {key: update.program for key, update in step.updates.items()}
        if not {program.key for program in programs.values()} <= self._compared:
            self._compare(list(self._all(stand_ins)), steps_ahead)
        return programs

    def forms(self, stand_in: StandIn, program: UpdateProgram) -> list[UpdateProgram]:
        """``program``, and what else the update of ``stand_in``'s group and dtype was seen to be, step by step."""
        key = (stand_in.group, stand_in.dtype)
        seen = {id(known.program): known.program for k, known in self._known.items() if k[:2] == key}
        return [program, *(other for other in seen.values() if other is not program)]

    def state_names(self, stand_in: StandIn) -> tuple[dict[str, torch.dtype], frozenset[str]]:
        """The states that there are after the coming step: those that are flat, with dtypes, and the others.

        Raises:
            OptimizerError: the step does what cannot be done on flat shards.
        """
        outcome = run_on_stand_in(self._optimizer, outside(self._optimizer), stand_in)
        return {name: state.dtype for name, state in outcome.skeleton.flat}, frozenset(outcome.scalars)

    def _compare(self, stand_ins: Sequence[StandIn], steps_ahead: int) -> None:
        state = outside(self._optimizer)
        other = SideBySide(self._optimizer, state, stand_ins)
        for number in range(1, steps_ahead + 1):
            try:
                before = state
                updates, state = self._step([s for s in other.stand_ins if s.has_gradient], before)
            except OptimizerError as error:
                if number == 1:
                    raise
                raise OptimizerError(f"{error} (in step {number} from here)") from error
            self.changes_outside |= not same([*before.groups, before.attributes], [*state.groups, state.attributes])
            try:
                difference = other.step(updates, state)
            except Exception as error:
                raise self._refuse(
                    f"steps on one parameter, but not on several of other sizes ({type(error).__name__}: {error}): it "
                    "combines them"
                ) from error
            if difference:
                raise self._refuse(
                    f"leaves another {difference} in step {number} from here than the operators that its step calls "
                    "for one parameter: it depends on something besides parameter, gradient, state[p], its groups and "
                    "its attributes, such as random numbers or the number of parameters"
                )
            self._compared |= {update.program.key for update in updates.values()}

    def _step(
        self, stand_ins: Sequence[StandIn], state: OptimizerRest
    ) -> tuple[dict[Any, ComingUpdate], OptimizerRest]:
        """The updates from ``state``, and what is outside of the states after them."""
        groups: dict[int, dict[str, Any]] = {}
        attributes: dict[str, Any] | None = None
        updates: dict[Any, ComingUpdate] = {}
        for stand_in in self._all(stand_ins):
            outcome = run_on_stand_in(self._optimizer, state, stand_in)
            group = groups.setdefault(stand_in.group, outcome.group)
            attributes = outcome.attributes if attributes is None else attributes
            if not (same(group, outcome.group) and same(attributes, outcome.attributes)):
                raise self._refuse("changes its groups or attributes in ways that depend on the parameter")
            if stand_in.has_gradient:
                updates[stand_in.key] = self._update(stand_in, state, outcome)
        return updates, OptimizerRest(tuple(groups[i] for i in sorted(groups)), attributes or {})

    def _all(self, stand_ins: Sequence[StandIn]) -> Iterable[StandIn]:
        """``stand_ins``, and one without a gradient for each group that has none."""
        yield from stand_ins
        for index in range(len(self._optimizer.param_groups)):
            if all(stand_in.group != index for stand_in in stand_ins):
                yield StandIn(index, torch.float32, has_gradient=False)

    def _update(self, stand_in: StandIn, state: OptimizerRest, outcome: StandInOutcome) -> ComingUpdate:
        key = (stand_in.group, stand_in.dtype, stand_in.flat, outcome.skeleton)
        known = self._known.get(key)
        if known is None:
            self._check_shapes(stand_in, state, outcome)
            known = self._known[key] = self._build(stand_in, outcome.skeleton)
            alike = {id(other.program) for k, other in self._known.items() if k[:2] == key[:2]}
            if len(alike) > _MOST_PROGRAMS:
                raise self._refuse(
                    f"has more than {_MOST_PROGRAMS} forms, each of which has to be compiled: what it counts decides "
                    "which operators it calls"
                )
        flat = dict(outcome.skeleton.flat)
        if lost := [name for name, _ in stand_in.flat if name not in flat]:
            raise self._refuse(f"drops state {lost[0]!r}")
        numbers = tuple(outcome.numbers[index] for index in known.heard)
        return ComingUpdate(known.program, numbers, outcome.scalars, frozenset(outcome.scalars) | frozenset(flat))

    def _check_shapes(self, stand_in: StandIn, state: OptimizerRest, outcome: StandInOutcome) -> None:
        for index, shape in enumerate(SHAPES):
            other = run_on_stand_in(self._optimizer, state, stand_in, shape)
            if other.skeleton == outcome.skeleton and same(other.numbers, outcome.numbers):
                continue
            if index == 0:
                raise self._refuse(
                    "does something else when the same step is run again: it depends on random numbers, the time, or "
                    "what it keeps outside of its groups and attributes"
                )
            raise looks_at_shapes(type(self._optimizer).__name__)

    def _build(self, stand_in: StandIn, skeleton: Skeleton) -> _Known:
        before = frozenset(name for name, _ in stand_in.flat)
        initial = {name: fill for name in before if (fill := self._fills.get((stand_in.group, name), 0.0)) is not None}
        trace = Trace(skeleton.records, (), dict(skeleton.flat), {}, frozenset(), {})
        built = build_graph(trace, before, initial)
        for spec in built.states:
            if spec.name not in before:
                self._fills[stand_in.group, spec.name] = None if spec.written_first else spec.initial
        name = type(self._optimizer).__name__
        program = UpdateProgram(
            optimizer=name,
            states=built.states,
            scalar_states=(),
            tensor_scalars=(),
            graph=built.graph,
            num_scalars=len(built.scalars),
            host_name=re.sub(r"\W", "_", name).lower() + "_scalars",
            host_source="",
            dtype=stand_in.dtype,
            fused=False,
            first_step_only=False,
            state_before=frozenset(),
            state_after=frozenset(),
        )
        program = self._programs.setdefault(program.key, program)
        heard = [use.expr.index for use in built.scalars if isinstance(use.expr, Heard)]
        assert len(heard) == len(built.scalars), "all that a step's own Python computes is heard"
        return _Known(program, tuple(heard))

    def _refuse(self, reason: str) -> OptimizerError:
        return not_elementwise(type(self._optimizer).__name__, reason)
