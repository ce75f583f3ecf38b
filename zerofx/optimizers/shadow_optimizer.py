"""Follow an optimizer: before each training step, run its own ``step`` on stand-ins and use what that did.

The step is run for each group and dtype on tensors of a few elements (``zerofx.optimizers.stand_in``). This gives the
operators of the coming update, which choose the program, the numbers that go with them, and the values that the step
leaves in states that are no flat tensors, in groups and attributes.

A program is used only after it has been compared, bit for bit and for several steps ahead, with the optimizer itself on
tensors of other sizes, all groups together and two parameters in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import NotElementwiseError, looks_at_shapes, not_elementwise
from zerofx.optimizers.build import build_graph
from zerofx.optimizers.merged_groups import MergedGroups, groups_alike, same_outcomes
from zerofx.optimizers.outside import Change, OptimizerRest, changes, is_unchanged, optimizer_rest, same
from zerofx.optimizers.program import UpdateProgram
from zerofx.optimizers.shadow import on_host
from zerofx.optimizers.side_by_side import ComingUpdate, SideBySide
from zerofx.optimizers.stand_in import SHAPES, Repeated, StandIn, StandInOutcome, StandInStep, first_scalars
from zerofx.optimizers.support import check_parts, refuse_by_name, refuse_dtype
from zerofx.optimizers.whole import WholeOptimizer

# What is compiled is a program for each form of the update: an update that counts what it calls has one a step.
_MOST_PROGRAMS: Final = 8
# RAdam, of those that decide by a count, is the last to change its update: in the sixth step.
_STEPS_AHEAD: Final = 12


@dataclass(frozen=True)
class NextStep:
    """The coming step: the update of each stand-in by its key, and what the step changes besides the states."""

    updates: dict[Any, ComingUpdate]
    changes: list[Change]


@dataclass(frozen=True)
class _Known:
    """The program of a skeleton, which of the step's numbers are its scalars, and which states have values after it."""

    program: UpdateProgram
    heard: tuple[int, ...]
    present: frozenset[str]


@dataclass
class _OfGroup:
    """Facts about the updates of one group and dtype.

    ``fills``: what fills each state before the first step; None where that step writes it.
    """

    known: dict[Any, _Known] = field(default_factory=dict)
    fills: dict[str, float | None] = field(default_factory=dict)

    @property
    def programs(self) -> list[UpdateProgram]:
        return list({id(known.program): known.program for known in self.known.values()}.values())


class ShadowOptimizer:
    """Follows one optimizer. It is neither stepped nor changed, but for what ``NextStep.changes`` are swapped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._of_groups: dict[tuple[Any, ...], _OfGroup] = {}
        self._recorded: dict[Any, list[StandInStep]] = {}  # by form, the last one first
        self._programs_of: dict[StandInStep, _Known] = {}
        self._together = Repeated([])
        self._merged = MergedGroups([], ())
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._programs: dict[str, UpdateProgram] = {}
        self._compared: set[str] = set()
        self._last: tuple[list[Any], OptimizerRest, NextStep] | None = None  # which changed nothing outside of states

    def next_step(self, stand_ins: Sequence[StandIn]) -> NextStep:
        """The coming step from what the optimizer's groups and attributes say now.

        Raises:
            OptimizerError: the step does what cannot be done on flat shards.
        """
        state, keys = optimizer_rest(self._optimizer), [stand_in.key for stand_in in stand_ins]
        if self._last is not None and self._last[0] == keys and is_unchanged(self._last[1], state):
            return self._last[2]
        updates, after = self._step(stand_ins, state)
        changed: list[Change] = []
        for group, before, values in zip(self._optimizer.param_groups, state.groups, after.groups, strict=True):
            changed += changes(group, before, values)
        changed += changes(vars(self._optimizer), state.attributes, after.attributes)
        coming = NextStep(updates, changed)
        self._last = None if changed else (keys, state, coming)
        return coming

    def programs(self, stand_ins: Sequence[StandIn]) -> dict[Any, UpdateProgram]:
        """The programs of the coming step by the stand-ins' keys, compared with the optimizer itself.

        Programs that have not been compared yet are, for some steps from here: what comes up later than that is
        compared when it does.

        Raises:
            OptimizerError: the update cannot run on flat shards, or hides what it depends on; nothing has changed.
        """
        for group in self._optimizer.param_groups:
            refuse_by_name(self._optimizer, group)
        if others := [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]:
            raise self._refuse(f"keeps states of {others[0]!r}, which is no parameter")
        for stand_in in stand_ins:
            refuse_dtype(stand_in.dtype)
        programs = {key: update.program for key, update in self.next_step(stand_ins).updates.items()}
        for fused in (False, True):
            # A fused kernel is torch's own, and may be right for a dtype on other devices only: what is compared is how
            # it is called.
            apart = [_to_float32(stand_in) if fused else stand_in for stand_in in stand_ins if stand_in.fused is fused]
            if any(_comparison_key(programs[s.key]) not in self._compared for s in stand_ins if s.fused is fused):
                self._compare(list(self._all({s.key: s for s in apart}.values())))
        return programs

    def forms(self, stand_in: StandIn, program: UpdateProgram) -> list[UpdateProgram]:
        """``program``, and what else the update of ``stand_in``'s group and dtype was seen to be, step by step."""
        seen = self._group_facts(stand_in).programs
        if stand_in.fused:  # what was compared
            others = self._group_facts(_to_float32(stand_in)).programs
            seen += [_replace_dtype(other, stand_in.dtype) for other in others]
        return list({other.text: self._programs.setdefault(other.text, other) for other in (program, *seen)}.values())

    def state_names(self, stand_in: StandIn) -> tuple[dict[str, torch.dtype], frozenset[str]]:
        """The states that there are after the coming step: those that are flat, with dtypes, and the others.

        Raises:
            OptimizerError: the step does what cannot be done on flat shards.
        """
        with on_host():
            step = StandInStep(optimizer_rest(self._optimizer), stand_in)
        flat = {name: state.dtype for name, state in step.skeleton.flat if not state.is_single}
        return flat, frozenset(dict(step.skeleton.flat).keys() - flat.keys()) | frozenset(step.outcome.scalars)

    def _compare(self, stand_ins: Sequence[StandIn]) -> None:
        state = optimizer_rest(self._optimizer)
        other = SideBySide(state, stand_ins)
        for number in range(1, _STEPS_AHEAD + 1):
            try:
                updates, state = self._step([s for s in other.stand_ins if s.has_gradient], state)
            except OptimizerError as error:
                if number == 1:
                    raise
                raise type(error)(f"{error} (in step {number} from here)") from error
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
            self._compared |= {_comparison_key(update.program) for update in updates.values()}

    def _step(
        self, stand_ins: Sequence[StandIn], state: OptimizerRest
    ) -> tuple[dict[Any, ComingUpdate], OptimizerRest]:
        """The updates from ``state``, and what is outside of the states after them."""
        groups: dict[int, dict[str, Any]] = {}
        attributes: dict[str, Any] | None = None
        updates: dict[Any, ComingUpdate] = {}
        with on_host():
            ran = self._run(list(self._all(stand_ins)), state)
        for stand_in, outcome, known in ran:
            group = groups.setdefault(stand_in.group, outcome.group)
            attributes = outcome.attributes if attributes is None else attributes
            if not (same(group, outcome.group) and same(attributes, outcome.attributes)):
                raise self._refuse("changes its groups or attributes in ways that depend on the parameter")
            if stand_in.has_gradient:
                numbers = tuple([outcome.numbers[index] for index in known.heard])
                updates[stand_in.key] = ComingUpdate(known.program, numbers, outcome.scalars, known.present)
        return updates, replace(state, groups=tuple(groups[i] for i in sorted(groups)), attributes=attributes or {})

    def _all(self, stand_ins: Iterable[StandIn]) -> Iterator[StandIn]:
        """``stand_ins``, and one without a gradient for each group that has none."""
        groups = set()
        for stand_in in stand_ins:
            groups.add(stand_in.group)
            yield stand_in
        for index in range(len(self._optimizer.param_groups)):
            if index not in groups:
                yield StandIn(index, torch.float32, has_gradient=False)

    def _run(self, stand_ins: list[StandIn], state: OptimizerRest) -> list[tuple[StandIn, StandInOutcome, _Known]]:
        """The step on each stand-in: all as they were done last, or else one by one."""
        last = [self._recorded.get(stand_in.form) for stand_in in stand_ins]
        if all(last):
            steps = [recorded[0] for recorded in last if recorded]
            outcomes = self._run_together(steps, state, stand_ins)
            if outcomes is not None:
                return list(zip(stand_ins, outcomes, [self._programs_of[step] for step in steps], strict=True))
        return [(stand_in, *self._run_alone(stand_in, state)) for stand_in in stand_ins]

    def _run_together(
        self, steps: list[StandInStep], state: OptimizerRest, stand_ins: list[StandIn]
    ) -> list[StandInOutcome] | None:
        """The recorded steps as one; None if it does not do the same.

        Torch's own steps treat groups alike, so those that differ in numbers alone are done once for all, where that
        was seen to give what they give group by group.
        """
        alike, merged = groups_alike(steps, stand_ins) if self._is_torchs else (), self._merged
        is_known = merged.steps == steps and merged.alike == alike
        if is_known and merged.is_right:
            if (outcomes := merged.outcomes(state, stand_ins)) is not None:
                return outcomes
            merged.is_right = False
        if tuple(steps) != self._together.steps:
            self._together = Repeated(steps)
        outcomes = self._together.outcomes(state, stand_ins)
        if self._is_torchs and not is_known and outcomes is not None:
            self._merged = MergedGroups(steps, alike)
            self._merged.is_right = same_outcomes(self._merged.outcomes(state, stand_ins), outcomes)
        return outcomes

    def _run_alone(self, stand_in: StandIn, state: OptimizerRest) -> tuple[StandInOutcome, _Known]:
        """The step on one stand-in: as one that was recorded, where it does the same, or else recorded."""
        recorded = self._recorded.setdefault(stand_in.form, [])
        for step in recorded:
            if (outcome := _repeat(step, stand_in, state)) is not None:
                recorded.remove(step)
                recorded.insert(0, step)
                return outcome, self._programs_of[step]
        step = StandInStep(state, stand_in)
        known = self._look_up_or_build(stand_in, state, step)
        if _is_repeated(step, stand_in, state):
            recorded.insert(0, step)
            self._programs_of[step] = known
            for old in recorded[_MOST_PROGRAMS:]:
                recorded.remove(old)
                del self._programs_of[old]
        return step.outcome, known

    def _group_facts(self, stand_in: StandIn) -> _OfGroup:
        return self._of_groups.setdefault((stand_in.group, stand_in.dtype, stand_in.fused), _OfGroup())

    def _look_up_or_build(self, stand_in: StandIn, state: OptimizerRest, step: StandInStep) -> _Known:
        of_group, skeleton = self._group_facts(stand_in), step.skeleton
        before = (*stand_in.flat, *stand_in.singles)
        key = (before, skeleton, frozenset(step.outcome.scalars))
        if key not in of_group.known:
            if lost := [name for name, _ in before if name not in dict(skeleton.flat)]:
                raise self._refuse(f"drops state {lost[0]!r}")
            self._check_shapes(stand_in, state, step)
            of_group.known[key] = self._build(stand_in, step, of_group)
            if len(of_group.programs) > _MOST_PROGRAMS:
                raise self._refuse(
                    f"has more than {_MOST_PROGRAMS} forms, each of which has to be compiled: what it counts decides "
                    "which operators it calls"
                )
        return of_group.known[key]

    def _check_shapes(self, stand_in: StandIn, state: OptimizerRest, step: StandInStep) -> None:
        for index, shape in enumerate(SHAPES):
            other = StandInStep(state, stand_in, shape)
            if other.skeleton == step.skeleton and same(other.outcome.numbers, step.outcome.numbers):
                continue
            if index == 0:
                raise self._refuse(
                    "does something else when the same step is run again: it depends on random numbers, the time, or "
                    "what it keeps outside of its groups and attributes"
                )
            raise looks_at_shapes(self._name)

    def _build(self, stand_in: StandIn, step: StandInStep, of_group: _OfGroup) -> _Known:
        skeleton = step.skeleton
        before = {name: of_group.fills.get(name, 0.0) for name, _ in (*stand_in.flat, *stand_in.singles)}
        built = build_graph(skeleton.records, dict(skeleton.flat), before)
        for spec in (*built.states, *built.tensor_scalars):
            if spec.name not in before:
                of_group.fills[spec.name] = None if spec.written_first else spec.initial
        program = UpdateProgram(
            optimizer=self._name,
            states=built.states,
            tensor_scalars=built.tensor_scalars,
            graph=built.graph,
            scalars=tuple(heard.use for heard in built.scalars),
            dtype=stand_in.dtype,
            fused=stand_in.fused,
        )
        program = self._programs.setdefault(program.text, program)
        present = frozenset(dict(skeleton.flat)) | frozenset(step.outcome.scalars)
        return _Known(program, tuple(heard.index for heard in built.scalars), present)

    def _refuse(self, reason: str) -> OptimizerError:
        return not_elementwise(self._name, reason)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update cannot run on flat shards.

    Raises:
        OptimizerError: it names the optimizer and the operator, state or option that is in the way.
    """
    stand_ins: list[StandIn] = []
    for index, group in enumerate(optimizer.param_groups):
        refuse_by_name(optimizer, group)
        dtypes = dict.fromkeys(param.dtype for param in group["params"] if param.requires_grad)
        stand_ins += [_stand_in(optimizer, index, dtype) for dtype in dtypes]
    if stand_ins:
        ShadowOptimizer(optimizer).programs(stand_ins)


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update can run neither on flat shards nor on whole parameters.

    Raises:
        OptimizerError: it names the optimizer and the operator, state or option that is in the way.
    """
    try:
        check_elementwise(optimizer)
    except NotElementwiseError as error:
        WholeOptimizer(optimizer, error).check()
        return
    for index, group in enumerate(optimizer.param_groups):
        for dtype in dict.fromkeys(param.dtype for param in group["params"] if param.requires_grad):
            if dtype.is_complex:
                check_parts(optimizer_rest(optimizer).select_group(index), dtype)


def _stand_in(optimizer: torch.optim.Optimizer, index: int, dtype: torch.dtype) -> StandIn:
    """The stand-in for a group's parameters of one dtype, with the states that the constructor made for the first."""
    group = optimizer.param_groups[index]
    states = [optimizer.state[p] for p in group["params"] if p.dtype == dtype and optimizer.state.get(p)]
    state: dict[str, Any] = states[0] if states else {}
    real = dtype.to_real() if dtype.is_floating_point or dtype.is_complex else dtype
    scalars = scalar_state_names(optimizer, index, dtype=real) if state else frozenset()
    flat = {name: value.dtype.to_real() for name, value in state.items() if name not in scalars and value is not None}
    return StandIn(
        index, real, tuple(flat.items()), tuple((name, value) for name, value in state.items() if name not in flat)
    )


def scalar_state_names(
    optimizer: torch.optim.Optimizer, index: int, *, dtype: torch.dtype, fused: bool = False
) -> frozenset[str]:
    """The states of which all parameters that are updated together have one value; of others each has its own.

    The update says which, since a 0-dim parameter's states are all alike; of states that its present options do not
    make, or of an optimizer that cannot run, what the parameters of more dimensions in the group ``index`` hold.
    ``fused``: the update calls torch's one kernel.
    """
    held = _scalars_by_shape(optimizer, optimizer.param_groups[index])
    flat, scalars = _states_of_update(optimizer, index, dtype, fused)
    return scalars | frozenset(name for name in held.keys() - flat.keys() if held[name])


def initial_scalars(optimizer: torch.optim.Optimizer, index: int, *, dtype: torch.dtype) -> dict[str, Any]:
    """The states of the group ``index`` that are no flat tensors, as they begin.

    Raises:
        OptimizerError: the step does what cannot be done on flat shards.
    """
    with on_host():
        return first_scalars(optimizer_rest(optimizer), StandIn(index, dtype))


def flat_state_dtypes(
    optimizer: torch.optim.Optimizer, index: int, *, dtype: torch.dtype, fused: bool = False
) -> dict[str, torch.dtype]:
    """The dtypes that the optimizer gives its states by itself, of those that each element of a parameter has.

    Arguments are those of ``scalar_state_names``.
    """
    return _states_of_update(optimizer, index, dtype, fused)[0]


def _states_of_update(
    optimizer: torch.optim.Optimizer, index: int, dtype: torch.dtype, fused: bool
) -> tuple[dict[str, torch.dtype], frozenset[str]]:
    """The states that a group's update makes: those that are flat, with dtypes, and scalars; none if it cannot run."""
    try:
        return ShadowOptimizer(optimizer).state_names(StandIn(index, dtype, fused=fused))
    except OptimizerError:  # what makes the update to run it says what is in the way
        return {}, frozenset()


def _scalars_by_shape(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """For states whose shape or type tells: True if a state of the group's parameters is a scalar.

    A tensor among the states of a 0-dim parameter has shape [] either way, and tells nothing.
    """
    is_scalar: dict[str, bool] = {}
    for param in group["params"]:
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and param.dim():
                is_scalar[name] = value.dim() == 0
            elif value is not None and not isinstance(value, torch.Tensor):
                is_scalar[name] = True
    return is_scalar


def _is_repeated(step: StandInStep, stand_in: StandIn, state: OptimizerRest) -> bool:
    """True if the step, done again, gives the same numbers: tried with hyperparameters that are a little smaller, so
    that a number that was taken for another shows."""
    if step.calls is None:
        return False
    group = {key: _smaller(value) for key, value in state.groups[stand_in.group].items()}
    groups = tuple(group if index == stand_in.group else other for index, other in enumerate(state.groups))
    smaller = replace(state, groups=groups)
    for tried in (state, smaller):
        outcome = _repeat(step, stand_in, tried)
        try:
            expected = StandInStep(tried, stand_in)
        except OptimizerError:
            return False
        if outcome is not None and not same(outcome.numbers, expected.outcome.numbers):
            return False
        if outcome is None and tried is state:
            return False
    return True


def _repeat(step: StandInStep, stand_in: StandIn, state: OptimizerRest) -> StandInOutcome | None:
    """A recorded step on one stand-in; None where it does not do the same."""
    outcomes = Repeated([step]).outcomes(state.select_group(stand_in.group), [replace(stand_in, group=0)])
    return None if outcomes is None else outcomes[0]


def _smaller(value: Any) -> Any:
    if isinstance(value, float):
        return value * (1.0 - 2.0**-6)
    return tuple(map(_smaller, value)) if type(value) is tuple else value


def _to_float32(stand_in: StandIn) -> StandIn:
    flat = tuple((name, torch.float32) for name, _ in stand_in.flat)
    return replace(stand_in, dtype=torch.float32, flat=flat)


def _comparison_key(program: UpdateProgram) -> str:
    """A text that is equal for programs of which one is compared: for fused ones, in whatever dtype."""
    return _replace_dtype(program, torch.float32).text if program.fused else program.text


def _replace_dtype(program: UpdateProgram, dtype: torch.dtype) -> UpdateProgram:
    """A fused update, whose states have the parameter's dtype, for parameters of another."""
    return replace(program, dtype=dtype, states=tuple(replace(spec, dtype=dtype) for spec in program.states))
