"""The coming update of whole parameters on one rank: the optimizer's own step on what it owns, or on all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zerofx.errors import OptimizerError
from zerofx.ir.buckets import Bucket
from zerofx.ir.owners import OwnedSlot, Owners
from zerofx.optimizers.outside import Change, OptimizerRest, plain_attributes
from zerofx.optimizers.program import UpdateProgram
from zerofx.optimizers.shadow import choose_implementation, run_step, step_of_class
from zerofx.optimizers.whole.combined import Combined, Share, check_apart, owner_of, set_owner
from zerofx.optimizers.whole.owned import OwnedStates, cast_views, state_bytes, state_views, store_entry, whole_of
from zerofx.optimizers.whole.states import join_tensors, split_tensors
from zerofx.optimizers.whole.trial import make_shadow, refuse_draws
from zerofx.torch_private.capture import FakeTensorMode, fake_mode


@dataclass(frozen=True)
class WholeNext:
    """The coming step: the optimizer without its states ``before`` it and, unless it combines parameters, ``after`` it,
    with the ``changes`` to it that follow; ``change`` makes those of a step that combines them once it is done.

    ``order``: the group and number of each parameter by its identity.
    """

    before: OptimizerRest
    after: OptimizerRest | None
    changes: list[Change]
    order: Mapping[int, tuple[int, int]]
    change: Callable[[OptimizerRest, OptimizerRest], None]


@dataclass(frozen=True)
class Updated:
    """A bucket in a coming step, of the optimizer's param group ``group``: its owners, this rank's number among
    them, where its parameters are among the optimizer's, and the states that this rank has."""

    bucket: Bucket
    group: int
    program: UpdateProgram
    owners: Owners
    rank: int
    places: Mapping[str, tuple[int, int]]
    states: OwnedStates

    @property
    def mine(self) -> tuple[OwnedSlot, ...]:
        """The parameters that this rank owns."""
        return self.owners.ranks[self.rank]


@dataclass(frozen=True)
class WholeStep:
    """The coming update of buckets by the owners of their parameters: what ``Runtime.update_whole`` runs on this rank.

    They are one bucket, or all of an optimizer that combines parameters.
    """

    coming: WholeNext
    buckets: tuple[Updated, ...]

    def __call__(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[torch.Tensor],
        parts: list[torch.Tensor],
        share: Share,
    ) -> None:
        """Step on the parameters in ``params``, with the gradients in ``grads``, flat, and the states in ``states``.
        ``parts``: both as all ranks of the model axis have them, of buckets with parameters in parts.

        Raises:
            OptimizerError: the step combines parameters otherwise than when it was tried, draws random numbers, or
                keeps states of other shapes.
        """
        buffers, gathered = iter(states), iter(parts)
        mine = []
        for each, param, grad in zip(self.buckets, params, grads, strict=True):
            of_axis = (next(gathered), next(gathered)) if each.bucket.has_model_parts else (param[None], grad[None])
            buffer = next(buffers) if each.program.states else None
            mine.append(_Parameters(each, param, grad, of_axis, buffer))
        with refuse_draws(self.coming.before.kind.__name__, params[0].device):
            self._step(mine, share)

    def _step(self, mine: Sequence[_Parameters], share: Share) -> None:
        before, after = self.coming.before, self.coming.after
        if after is None:
            left = _step_combined(before, mine, share)
            self.coming.change(before, left)
        elif mine[0].own:
            (single,) = mine
            alone = before.select_group(single.updated.group)
            shadow = make_shadow(alone, [parameter for _, parameter in single.sort_places()])
            single.put_states(shadow)
            step_of_class(type(shadow))(shadow)
            if not alone.after(shadow).is_like(after.select_group(single.updated.group)):
                raise OptimizerError(
                    f"expected {alone.kind.__name__} to leave its groups and attributes alike for all parameters, "
                    f"found that those of {single.updated.bucket.name} make a difference: it combines parameters"
                )
            single.take_states(shadow)


def _step_combined(before: OptimizerRest, buckets: Sequence[_Parameters], share: Share) -> OptimizerRest:
    """One step over all parameters; returns the groups and attributes after it."""
    has_others = any(len(each.updated.owners.ranks) > 1 for each in buckets)
    fakes = fake_mode()  # one for all: what one rank owns of several buckets may meet
    for each in buckets if has_others else ():
        each.add_others(fakes)
    places = sorted(place for each in buckets for place in each.sort_places())
    shadow = before.shadow([[p for (index, _), p in places if index == group] for group in range(len(before.groups))])
    for group in shadow.param_groups:
        choose_implementation(before.kind, group)
    for each in buckets:
        each.put_states(shadow)
    with Combined(before.kind.__name__, share) if has_others else contextlib.nullcontext():
        run_step(shadow)
    for each in buckets:
        each.take_states(shadow)
    left = before.after(shadow)
    check_apart([left.groups, plain_attributes(shadow), left.own], before.kind.__name__)
    return left


class _Parameters:
    """The parameters of a bucket as an optimizer steps on them, by slot: this rank's ``own``, and those of others
    without values."""

    def __init__(
        self,
        updated: Updated,
        param: torch.Tensor,
        grad: torch.Tensor,
        of_axis: tuple[torch.Tensor, torch.Tensor],
        buffer: torch.Tensor | None,
    ) -> None:
        self.updated, self._param = updated, param
        empty = param.new_empty(0, dtype=torch.uint8)
        self._views = state_views(updated.program, updated.mine, empty if buffer is None else buffer)
        self._slots = {each.slot.name: each.slot for owned in updated.owners.ranks for each in owned}
        self.own: dict[str, torch.Tensor] = {}
        self._others: dict[str, torch.Tensor] = {}
        for each in updated.mine:
            parameter = self.own[each.slot.name] = torch.nn.Parameter(_join_parts(each, param, of_axis[0]))
            parameter.grad = _join_parts(each, grad, of_axis[1])

    def add_others(self, fakes: FakeTensorMode) -> None:
        """Add the parameters of other ranks, and note whose each is."""
        updated = self.updated
        for rank, owned in enumerate(updated.owners.ranks):
            for each in owned:
                if rank != updated.rank:
                    with fakes:
                        flat = torch.empty(each.num_taken, dtype=updated.bucket.dtype, device=self._param.device)
                        start = replace(each, offset=0)
                        of_axis = flat.expand(each.slot.num_parts, -1)
                        parameter: torch.Tensor = torch.nn.Parameter(_join_parts(start, flat, of_axis))
                        parameter.grad = _join_parts(start, flat.clone(), of_axis)
                        views = state_views(updated.program, [each], _no_buffer(updated.program, each, flat))
                    self._others[each.slot.name], self._views = parameter, self._views | views
                else:
                    parameter = self.own[each.slot.name]
                assert parameter.grad is not None
                for tensor in (parameter, parameter.grad, *self._views[each.slot.name].values()):
                    set_owner(tensor, rank)

    def sort_places(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """The parameters, each with its group and number."""
        both = self.own | self._others
        return sorted(((self.updated.places[name], p) for name, p in both.items()), key=lambda pair: pair[0])

    def put_states(self, shadow: torch.optim.Optimizer) -> None:
        """Give ``shadow`` their states."""
        for name, parameter in (self.own | self._others).items():
            tree = self.updated.states.trees.get(name)
            if tree is None:
                continue
            whole = whole_of(self.updated.program, self._slots[name])
            entry = join_tensors(tree, cast_views(whole, self._views[name]))
            owner = owner_of(parameter)
            if owner is not None:
                for tensor in split_tensors(entry, all_tensors=True)[1].values():
                    set_owner(tensor, owner)
            shadow.state[parameter] = entry

    def take_states(self, shadow: torch.optim.Optimizer) -> None:
        """Keep what ``shadow`` has left of them, and take it away: an optimizer is in cycles that a collector ends."""
        updated = self.updated
        for each in updated.mine:
            parameter, target = self.own[each.slot.name], _view(each, self._param)
            if each.slot.part is not None:
                each.slot.box_view(each.slot.view_at(self._param, each.offset)).copy_(each.slot.box(parameter.detach()))
            elif parameter.data_ptr() != target.data_ptr():
                target.copy_(parameter.detach())
        for owned in updated.owners.ranks:
            for each in owned:
                name = each.slot.name
                known = (self.own | self._others).get(name)
                if known is not None and (entry := shadow.state.pop(known, None)):
                    whole, is_here = whole_of(updated.program, each.slot), name in self.own
                    tree = store_entry(name, entry, self._views[name], whole, is_here=is_here)
                    updated.states.trees[name] = tree


def _no_buffer(program: UpdateProgram, each: OwnedSlot, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(state_bytes(program, [each]), dtype=torch.uint8, device=like.device)


def _view(each: OwnedSlot, flat: torch.Tensor) -> torch.Tensor:
    """A parameter, or this rank's part of it, in the flat tensor of what its owner has."""
    own = each.slot.view_at(flat, each.offset)
    return torch.view_as_complex(own) if each.slot.is_complex else own


def _join_parts(each: OwnedSlot, flat: torch.Tensor, of_axis: torch.Tensor) -> torch.Tensor:
    """A whole parameter: a view of ``flat``, or put together of the parts that the ranks of the model axis have."""
    slot = each.slot
    if slot.part is None:
        return _view(each, flat)
    whole = flat.new_empty(slot.whole_shape)
    for index, of_rank in enumerate(of_axis):
        part = replace(slot, part_index=index)
        part.box(whole).copy_(part.box_view(part.view_at(of_rank, each.offset)))
    return torch.view_as_complex(whole) if slot.is_complex else whole
