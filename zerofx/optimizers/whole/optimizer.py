"""Updates of whole parameters: an owner runs the user's own ``step`` on the parameters that it owns of a bucket.

What an optimizer does to a matrix (orthogonalise it, factor it, take its norm, its rows' statistics, its blocks of 256
elements from the first on) needs the whole of it. Each parameter is therefore put together at one rank, its owner
(``zerofx/ir/owners.py``), which steps an optimizer of the user's class over what it owns: groups, attributes, branches
and counters are what they are on one process, and so are the bits. States stay at the owner, whatever their shapes, in
one buffer of bytes a bucket, so that they have a tier as others do.

This holds for an optimizer that treats each parameter by itself, which is tried out first
(``zerofx/optimizers/whole/trial.py``). One that combines them (a norm of all gradients, an estimate of the distance to
a solution) steps on all ranks over all parameters at once, of which each has values at its owner alone, and what is
combined is sent to all (``zerofx/optimizers/whole/combined.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph

from zerofx.errors import OptimizerError
from zerofx.ir.buckets import Bucket, Slot
from zerofx.optimizers.outside import Change, OptimizerRest, changes, optimizer_rest, same
from zerofx.optimizers.program import WHOLE_STATES, StateSpec, UpdateProgram, WholeParameter
from zerofx.optimizers.shadow import choose_implementation, on_host, run_step, sample
from zerofx.optimizers.support import refuse_by_name, refuse_dtype
from zerofx.optimizers.whole.owned import Entry, dtype_of, shape_of
from zerofx.optimizers.whole.states import copy_entry, join_tensors, split_tensors
from zerofx.optimizers.whole.step import WholeNext
from zerofx.optimizers.whole.trial import (
    CombinesError,
    DoesNotRunError,
    Samples,
    Starts,
    check_combined,
    check_separable,
    keep_divisors,
    shrink,
    shrink_entry,
    try_shape,
)


class WholeOptimizer:
    """An optimizer whose step is run on whole parameters.

    A small parameter stands for each group, so that all ranks know what a step does to groups and attributes.
    ``because``: the error for flat shards. ``number``: its own among all optimizers. ``combines``: whether it combines
    parameters. ``kinds``: the tensor subclasses and objects among its states, by name. ``own_states``: entries of
    ``optimizer.state`` that are of no parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, because: OptimizerError, number: int = 0) -> None:
        self._optimizer, self._because, self._number = optimizer, because, number
        # Groups keep their parameters as long as a step has the optimizer.
        self._order = {
            id(p): (i, n) for i, group in enumerate(optimizer.param_groups) for n, p in enumerate(group["params"])
        }
        self._known: dict[Any, WholeParameter] = {}
        self._programs: dict[Any, UpdateProgram] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._token_states: dict[int, Any] = {}
        self._is_tried = False
        self.combines = False
        self.own_states: dict[Any, Any] = {}
        self.take_own_states(optimizer.state)
        self.kinds: dict[str, type[Any]] = {}

    def programs(self, buckets: Sequence[tuple[Bucket, int]], entries: Mapping[str, Entry]) -> dict[int, UpdateProgram]:
        """The update of each bucket, given with the index of its group, by its own index. ``entries``: states that
        parameters have already, by name.

        Raises:
            OptimizerError: the optimizer combines parameters, draws random numbers, or cannot be run.
        """
        rest = self._rest()
        parameters: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for bucket, group in buckets:
            refuse_dtype(bucket.dtype)
            if bucket.is_slice:
                raise OptimizerError(
                    f"expected whole parameters for {rest.kind.__name__}, whose update is not elementwise, found a "
                    f"slice of one in {bucket.name}: leave it out of tile="
                )
            parameters.setdefault(group, []).extend((shape_of(slot), dtype_of(bucket, slot)) for slot in bucket.slots)
        in_stages = any(bucket.mesh.pipe > 1 for bucket, _ in buckets)
        self.check(None if in_stages else parameters)
        if in_stages and self.combines:
            raise OptimizerError(
                f"expected an optimizer that updates each parameter by itself where the mesh has an axis 'pipe', found "
                f"{rest.kind.__name__}, which combines those of all stages: leave the axis out"
            )
        programs: dict[int, UpdateProgram] = {}
        for bucket, group in buckets:
            shapes = [self._try_slot(rest, bucket, group, slot, entries.get(slot.source, {})) for slot in bucket.slots]
            whole = tuple({each.shape: each for each in shapes}.values())
            key = (bucket.dtype, whole)
            if key not in self._programs:
                self._programs[key] = _program(
                    type(self._optimizer).__name__, bucket.dtype, whole, self._number if self.combines else None
                )
            programs[bucket.index] = self._programs[key]
        return programs

    def _all_parameters(self) -> dict[int, list[tuple[tuple[int, ...], torch.dtype]]]:
        """Shapes and dtypes of all that is trained, in all stages, by group."""
        listed = {
            index: [(tuple(p.shape), p.dtype) for p in group["params"] if p.requires_grad]
            for index, group in enumerate(self._optimizer.param_groups)
        }
        return {index: of_group for index, of_group in listed.items() if of_group}

    def take_own_states(self, states: Mapping[Any, Any]) -> None:
        """Take over the entries of ``optimizer.state`` that are of no parameter."""
        self.own_states = {key: value for key, value in states.items() if not isinstance(key, torch.Tensor)}

    def _rest(self) -> OptimizerRest:
        return replace(optimizer_rest(self._optimizer), own=self.own_states)

    def next_step(self) -> WholeNext:
        """The coming step as all ranks know it before it is done; changes nothing."""
        before = self._rest()
        if self.combines:
            return WholeNext(before, None, [], self._order, self._change)
        states = {index: copy_entry(entry) for index, entry in self._token_states.items()}
        with on_host():
            shadow = before.shadow([[self._tokens[i]] if i in self._tokens else [] for i in range(len(before.groups))])
            for index, group in enumerate(shadow.param_groups):
                choose_implementation(before.kind, group)
                if index in self._tokens:
                    token = self._tokens[index]
                    token.grad = torch.full_like(token, 0.01)
                    if index in states:
                        shadow.state[token] = states[index]
            run_step(shadow)
        token_states = {index: shadow.state.get(token, {}) for index, token in self._tokens.items()}
        after = before.after(shadow)
        changed = [Change(vars(self), "_token_states", token_states), *self._changes(before, after)]
        return WholeNext(before, after, changed, self._order, self._change)

    def _change(self, before: OptimizerRest, after: OptimizerRest) -> None:
        """Give the optimizer the groups and attributes that a step has left."""
        for change in self._changes(before, after):
            change.swap()

    def _changes(self, before: OptimizerRest, after: OptimizerRest) -> list[Change]:
        changed = []
        for own, old, new in zip(self._optimizer.param_groups, before.groups, after.groups, strict=True):
            changed += changes(own, old, new)
        changed += changes(vars(self._optimizer), before.attributes, after.attributes)
        return [*changed, *([] if same(before.own, after.own) else [Change(vars(self), "own_states", after.own)])]

    def check(self, parameters: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]] | None = None) -> None:
        """Check that a step treats parameters one by one; ``parameters``: their shapes and dtypes by group, None for
        all that are trained.

        Raises:
            OptimizerError: it combines them, draws random numbers, or cannot be run.
        """
        if self._is_tried:
            return
        for group in self._optimizer.param_groups:
            refuse_by_name(self._optimizer, group)
        with on_host():
            tried = self._all_parameters() if parameters is None else parameters
            samples, starts = self._try_ways(tried, with_states=bool(self._optimizer.state))
            self._tokens = {
                index: torch.nn.Parameter(sample(*listed[0], -1.0, 1.3)) for index, listed in samples.items()
            }
            own = {index: starts.get((index, listed[0][0]), {}) for index, listed in samples.items()}
            self._token_states = {index: entry for index, entry in own.items() if entry}
        self._is_tried = True

    def runs_without_states(self) -> bool:
        """True if a step of now runs on whole parameters without states, or is refused for what it does to them."""
        with on_host():
            try:
                self._try_ways(self._all_parameters(), with_states=False)
            except DoesNotRunError:
                return False
            except OptimizerError:
                pass
        return True

    def _try_ways(
        self, parameters: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]], *, with_states: bool
    ) -> tuple[Samples, Starts]:
        """Try the step on small parameters in the place of these, in ways that let more and more optimizers run:
        without states, then with those that there are, if ``with_states``."""
        ways = [(smaller, starts) for starts in (False, True) for smaller in (shrink, keep_divisors)]
        for smaller, has_starts in ways if with_states else ways[:2]:
            starts = self._starts(smaller) if has_starts else {}
            try:  # it may view rows as groups of so many, or need the states that its constructor makes
                return self._try_small(parameters, smaller, starts), starts
            except DoesNotRunError as error:
                last = error
        if with_states:  # it may need others: what was in the way on flat shards says more
            raise self._because from last
        raise last

    def _starts(self, smaller: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Starts:
        """The states that there are, in small, by group and small shape."""
        starts: dict[tuple[int, tuple[int, ...]], Any] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for shape, entry in ((tuple(p.shape), self._optimizer.state.get(p)) for p in group["params"]):
                if entry and (index, smaller(shape)) not in starts:
                    starts[index, smaller(shape)] = shrink_entry(entry, shape, smaller(shape))
        return starts

    def _try_small(
        self,
        parameters: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]],
        smaller: Callable[[tuple[int, ...]], tuple[int, ...]],
        starts: Starts,
    ) -> Samples:
        """Try the step on small parameters in the place of these; returns them, at most two that are alike."""
        small = {index: [(smaller(shape), dtype) for shape, dtype in listed] for index, listed in parameters.items()}
        samples = {
            index: [each for each in dict.fromkeys(listed) for _ in range(min(2, listed.count(each)))]
            for index, listed in small.items()
        }
        try:
            check_separable(self._rest(), samples, starts)
        except CombinesError:
            check_combined(self._rest(), samples, starts)
            self.combines = True
        return samples

    def _try_slot(self, rest: OptimizerRest, bucket: Bucket, group: int, slot: Slot, entry: Entry) -> WholeParameter:
        shape, dtype = shape_of(slot), dtype_of(bucket, slot)
        key = (group, shape, dtype)
        if key not in self._known:
            with on_host():
                entry = _cast_as_in_step(rest, group, shape, dtype, entry)
                self._known[key], kinds = try_shape(rest, group, shape, dtype, entry)
            self.kinds |= kinds
        return self._known[key]


def _cast_as_in_step(
    rest: OptimizerRest, group: int, shape: tuple[int, ...], dtype: torch.dtype, entry: Entry
) -> Entry:
    """``entry`` in the dtypes that a first step gives to states: it may have been stored in a smaller one."""
    tree, tensors = split_tensors(entry)
    if all(not t.is_floating_point() or t.dtype.itemsize >= dtype.itemsize for t in tensors.values()):
        return entry
    try:
        first, _ = try_shape(rest, group, shape, dtype, {})
    except OptimizerError:  # it steps only where there are states already
        return entry
    own = {state.path: state.dtype for state in first.states}
    cast: Entry = join_tensors(tree, {path: t.to(own.get(path, t.dtype)) for path, t in tensors.items()})
    return cast


def _program(name: str, dtype: torch.dtype, whole: tuple[WholeParameter, ...], joint: int | None) -> UpdateProgram:
    graph = Graph()
    for each in ("param", "grad", WHOLE_STATES):
        graph.placeholder(each)
    graph.output(())
    has_states = any(each.state_bytes for each in whole)
    states = (StateSpec(WHOLE_STATES, torch.uint8, 0.0),) if has_states else ()
    return UpdateProgram(name, states, (), graph, (), dtype, fused=False, whole=whole, joint=joint)
