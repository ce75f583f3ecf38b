"""``optimizer.state_dict()`` and ``load_state_dict()``: whole states per parameter, out of and into buckets."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakMethod

import torch

from zerofx.capture.checks import refuse_step
from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.optimizers.nested import NestedOptimizer, StatesAway
from zerofx.optimizers.program import WHOLE_STATES
from zerofx.optimizers.whole import cast_views, names_of, state_views, whole_of
from zerofx.optimizers.whole.states import copy_entry, join_tensors
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.stages import is_first_of_stage
from zerofx.runtime.state.state import TrainingState
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.optimizers import members_with_state_hooks


@dataclass(frozen=True)
class _OnDevice:
    """Values of a tensor on the device, as another rank, whose device has another number, takes them."""

    values: torch.Tensor


class _StatesElsewhere(StatesAway):
    """``optimizer.state`` while a step has the states. Who asks for one would find none; its copy is an empty table."""

    def __missing__(self, parameter: torch.Tensor) -> NoReturn:
        self._refuse(f"a look for those of a parameter of shape {list(parameter.shape)}")

    def __setitem__(self, parameter: torch.Tensor, _: Any) -> NoReturn:
        self._refuse(f"some put there for a parameter of shape {list(parameter.shape)}")

    def clear(self) -> NoReturn:
        self._refuse("them cleared")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"expected optimizer.state to be left alone while a step has the states in slices, found {what}: read them "
            f"by optimizer.state_dict() or step.full(name, state), set them by load_state_dict() (with "
            f"flatten_optimizer_state_dict=False where torch.distributed.checkpoint does it), or call step.close() "
            f"before what works on them (the eval() of a schedule-free optimizer, say), and compile after"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)


class OptimizerState:
    """Keeps ``state_dict()`` and ``load_state_dict()`` of each optimizer truthful: through torch's own hooks, which the
    classes of nests may not run; theirs ask for states as they read them (``StatesOnDemand``), or load those of a
    member, and all are taken over again before the next step.

    ``check_trained`` raises where states are not those of the parameters.
    """

    def __init__(
        self, binding: OptimizerBinding, state: TrainingState, control: Control, check_trained: Callable[[str], None]
    ) -> None:
        self._optimizers = binding.optimizers.each
        self._binding = binding
        self._state = state
        self._control, self._check_trained = control, check_trained
        self._handles: list[Any] = []
        # Not a cycle: a step that is closed lets go of its connections at once.
        fill = WeakMethod(self._fill_one)
        self._elsewhere = _StatesElsewhere(lambda mine: fill()(mine))  # type: ignore[misc]  # it is there meanwhile
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(refuse_step))
            if isinstance(optimizer, NestedOptimizer):
                members = members_with_state_hooks(optimizer)
                self._handles += [member.register_load_state_dict_pre_hook(optimizer.bring) for member in members]
            else:
                self._handles += [
                    optimizer.register_state_dict_pre_hook(self._elsewhere.bring),
                    optimizer.register_state_dict_post_hook(lambda mine, _: self._empty(mine)),
                    optimizer.register_load_state_dict_post_hook(self._note_loaded),
                ]
            if optimizer.state:
                self._absorb(optimizer)
            self._empty(optimizer)

    def give_back(self, *, alone: bool = False) -> None:
        """Leave every parameter's whole states in its optimizer, and let go of all; ``alone``: without other ranks.

        They are in the dtype that the optimizer computes with, so that its own ``step`` may follow.
        """
        for handle in self._handles:
            handle.remove()
        self.take_loaded()
        if alone:
            self._place_whole(self._optimizers, as_computed=True, alone=True)
        else:
            self._fill(self._optimizers, as_computed=True)

    def _fill_one(self, optimizer: torch.optim.Optimizer) -> None:
        self._fill([optimizer])

    def _fill(self, optimizers: Sequence[torch.optim.Optimizer], *, as_computed: bool = False) -> None:
        """Put every parameter's whole states where ``state_dict`` looks for them. A collective call.

        They are in the dtype that they are stored in, or ``as_computed`` with.
        """
        purpose = "call optimizer.state_dict()"
        self._check_trained(purpose)
        self._control.meet(purpose)
        with self._control.fail_together(purpose):
            self.take_loaded()
            self._state.flush()
            self._place_whole(optimizers, as_computed=as_computed)

    def _gather_trees(self, buckets: Sequence[Bucket]) -> list[dict[int, dict[str, Any]]]:
        """Objects that owners on each rank have of buckets besides tensors, by index and parameter; nothing where this
        rank has all. Collective."""
        here: dict[int, dict[str, Any]] = {}
        for bucket in buckets:
            mine = self._state.buckets[bucket.index]
            if mine.present and bucket.index in self._state.owners:
                self._state.settle_owned(bucket)
                names = names_of(self._state.find_owned(bucket))
                here[bucket.index] = {name: mine.owned.trees[name] for name in names if name in mine.owned.trees}
        # Stages may have different buckets, and some none with owners.
        is_alone = all(len(self._state.owners[index].ranks) == 1 for index in here)
        if self._state.layout.mesh.pipe == 1 and is_alone:
            return []
        gathered: list[dict[int, dict[str, Any]]] = self._control.gather(here, "gather the optimizer's states")
        return gathered

    def _place_owned(
        self,
        bucket: Bucket,
        states: defaultdict[torch.Tensor, Any],
        of_ranks: Sequence[dict[int, dict[str, Any]]],
        *,
        as_computed: bool,
    ) -> None:
        """Put the states that owners have of a bucket into ``states``: all of them with the trees ``of_ranks``, else
        those that are here."""
        if not self._state.buckets[bucket.index].present:
            return
        mine, program = self._state.buckets[bucket.index], self._binding.latest_programs[bucket.index]
        self._state.settle_owned(bucket)
        trees, buffer = [mine.owned.trees], mine.flat.get(WHOLE_STATES)
        buffers: Sequence[torch.Tensor | None] = [None if buffer is None else self._state.load(buffer)]
        listed = [self._state.find_owned(bucket)]
        owners = self._state.owners[bucket.index].ranks
        if len(owners) > 1 and of_ranks:
            members = bucket.mesh.members(self._control.rank, bucket.states_over)
            ranks = sorted(members, key=lambda rank: bucket.mesh.index(rank, bucket.states_over))
            trees, listed = [of_ranks[rank][bucket.index] for rank in ranks], list(owners)
            buffers = [None] * len(ranks) if buffers[0] is None else self._state.gather_owned(bucket, buffers[0])
        for own, owned, flat in zip(trees, listed, buffers, strict=True):
            views = state_views(program, owned, flat)
            for each in owned:
                if each.slot.name in own:
                    tensors = views[each.slot.name]
                    if as_computed:
                        tensors = cast_views(whole_of(program, each.slot), tensors)
                    entry = join_tensors(own[each.slot.name], tensors)
                    states[self._state.parameter(each.slot.source)] = copy_entry(entry)

    def _place_whole(
        self, optimizers: Sequence[torch.optim.Optimizer], *, as_computed: bool, alone: bool = False
    ) -> None:
        for optimizer in optimizers:
            states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
            buckets = self._binding.buckets_of(optimizer, self._state.parameters)
            of_ranks = [] if alone else self._gather_trees(buckets)
            for bucket in buckets:
                if bucket.index in self._state.owners:
                    self._place_owned(bucket, states, of_ranks, as_computed=as_computed)
                else:
                    self._gather(bucket, states, as_computed=as_computed)
            whole = self._binding.find_whole(optimizer)
            states.update({} if whole is None else copy_entry(whole.own_states))
            if not alone:
                self._add_stages(states)
            optimizer.state = states

    def _add_stages(self, states: defaultdict[torch.Tensor, Any]) -> None:
        """Add what other stages have of the parameters of theirs. Collective."""
        mesh = self._state.layout.mesh
        if mesh.pipe == 1:
            return
        names = {id(tensor): name for name, tensor in self._state.parameters.items()}
        own = {names[id(parameter)]: entry for parameter, entry in states.items()}
        sent, device = own if is_first_of_stage(self._control, mesh) else {}, self._state.device

        def pack(leaf: Any) -> Any:
            is_there = isinstance(leaf, torch.Tensor) and leaf.device.type == device.type
            return _OnDevice(leaf.cpu()) if is_there else leaf

        def unpack(leaf: Any) -> Any:
            return leaf.values.to(device) if isinstance(leaf, _OnDevice) else leaf

        for of_rank in self._control.gather(pytree.tree_map(pack, sent), "gather the optimizer's states"):
            others = {name: of_rank[name] for name in of_rank.keys() - own.keys()}
            states.update({self._state.parameter(name): pytree.tree_map(unpack, e) for name, e in others.items()})

    def _gather(self, bucket: Bucket, states: defaultdict[torch.Tensor, Any], *, as_computed: bool) -> None:
        """Add the whole states of a bucket's parameters to ``states``."""
        state = self._state.buckets[bucket.index]
        if not state.present:
            return
        flat = {n: self._state.gather(bucket, self._state.load(t)) for n, t in state.flat.items() if n in state.present}
        if as_computed:
            flat = {n: whole.to(bucket.optimizer_dtype(whole.dtype)) for n, whole in flat.items()}
        for slot in bucket.slots:
            entry: dict[str, Any] = {n: _copy(v) for n, v in state.scalars.items() if n in state.present}
            parameter = self._state.parameter(slot.source)
            held = states[parameter] if slot.first_row else {}
            for name, whole in flat.items():
                mine = self._state.to_parameter(slot, whole)
                if slot.whole is None:
                    entry[name] = mine.clone()
                    continue
                entry[name] = held[name] if name in held else mine.new_empty(parameter.shape)
                slot.box(entry[name]).copy_(slot.view(whole))
            states[parameter] = entry

    def _empty(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state = self._elsewhere

    def _note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Check what has been loaded; the ``load_state_dict`` of a subclass may still work on it, after torch's."""
        try:
            self._check_trained("call optimizer.load_state_dict()")
            self._binding.find_states(self._state.parameters)
        except BaseException:
            self._empty(optimizer)
            raise

    def take_loaded(self) -> None:
        """Take over what has been loaded since the last step, or put in the place of ``optimizer.state``.

        Raises:
            UsageError: some members of a nest have been given states, which are lost, and others have none.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, NestedOptimizer) and optimizer.has_states_in_part:
                self._empty(optimizer)
                raise UsageError(
                    f"expected the states of {type(optimizer).__name__} to be set together, found those of a part of "
                    f"it set, which are left out: call load_state_dict() of {type(optimizer.outer).__name__}"
                )
            if optimizer.state is not self._elsewhere:
                self._absorb(optimizer)

    def _absorb(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the states that an optimizer holds per parameter; its parameters without any begin anew."""
        self._state.bring_up()
        # What is under way for the states that go must not reach those that come.
        self._state.settle()
        try:
            held = self._binding.find_states(self._state.parameters)
            if (updater := self._binding.find_whole(optimizer)) is not None:
                updater.take_own_states(optimizer.state)
        finally:
            self._empty(optimizer)
        for bucket in self._binding.buckets_of(optimizer, self._state.parameters):
            mine = self._state.buckets[bucket.index]
            if bucket.index not in held:
                mine.forget()
                continue
            states = held[bucket.index]
            if bucket.trainable and self._binding.find_whole(optimizer) is not None:
                mine.forget()
                mine.owned.waiting = {name: dict(entry) for name, entry in states.entries.items() if entry}
                mine.present = frozenset({WHOLE_STATES})
                continue
            mine.scalars = {**mine.scalars, **{name: _copy(value) for name, value in states.scalars.items()}}
            for name, values in states.flat.items():
                whole = torch.zeros(bucket.numel, dtype=values[0].dtype.to_real(), device=self._state.device)
                for slot, value in zip(bucket.slots, values, strict=True):
                    slot.box_view(slot.view(whole)).copy_(slot.box(value))
                self._state.set_flat(bucket, name, self._state.slice(bucket, whole).clone())
            mine.present = states.present


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
