"""A model and optimizers that a step has taken over: their values are in its buckets until it is closed.

A checkpoint that is loaded before the first step waits for these buckets with its optimizer states (``Awaited``).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zerofx.capture.checks import check_step_hooks
from zerofx.checkpoints.fill import Source, fill_training
from zerofx.checkpoints.load import Loadable, entries_of, load_buffers
from zerofx.checkpoints.training import Training
from zerofx.choices import SlowerTier
from zerofx.deferred import allow_replacement
from zerofx.driver.driver import Built
from zerofx.driver.prepared import Earlier
from zerofx.errors import UsageError, notify
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.tensor_parts import named_parameters
from zerofx.lowering.load import CompiledStep
from zerofx.optimizers import Optimizers, UpdateProgram
from zerofx.optimizers.nested import NestedOptimizer, StatesAway
from zerofx.options import CompileOptions
from zerofx.passes.lib.message_check import order_on_links
from zerofx.runtime.comm.collectives import make_transport
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.cuda_graphs.recording import own_memory
from zerofx.runtime.executor import Runtime
from zerofx.runtime.measure.measure import persistent_bytes
from zerofx.runtime.state.arguments import Loans, StepArguments, state_tensors
from zerofx.runtime.state.loss_scaler import LossScaler
from zerofx.runtime.state.on_demand import gather_on_demand
from zerofx.runtime.state.optimizer import Advance, advance
from zerofx.runtime.state.optimizer_state import OptimizerState
from zerofx.runtime.state.parked import Parked
from zerofx.runtime.state.state import TrainingState, do_nothing
from zerofx.runtime.state.values import Values
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.facts import unit_of
from zerofx.scheduler.plan.plan import Plan
from zerofx.session.guards import ParameterWatch, guard_model
from zerofx.session.life import Life
from zerofx.torch_private.dispatch import without_torch_functions
from zerofx.torch_private.optimizers import members_with_state_hooks, note_step
from zerofx.torch_private.tensors import memory_of
from zerofx.units import first_few

_IS_TRAINED = operator.attrgetter("requires_grad")


class TakenOver:
    """The state that a step holds of a model and its optimizers, from its first build on. Collective to make.

    ``values`` are what the parameters begin with. ``reads_memory``: whether ranks of a host
    may read each other's memory. ``scaler`` has the loss's scale, if it is scaled. ``read_lent`` gives what is read of
    other steps' models.
    """

    def __init__(
        self,
        model: nn.Module,
        built: Built,
        options: CompileOptions,
        values: Values,
        tiers: Tiers,
        life: Life,
        *,
        reads_memory: bool,
        scaler: LossScaler | None,
        read_lent: Callable[[], Loans],
    ) -> None:
        compiled, control = built.compiled, life.control
        device = compiled.device
        self.model, self.layout, self.binding, self.device = model, built.layout, built.binding, device
        self._life, self._tiers, self._outside = life, tiers, options.objective.free_tensors
        self.scaler, self._read_lent, self._shared = scaler, read_lent, built.shared
        with control.fail_together("take the model over"):
            transport = make_transport(
                life.group, device, control.rank_timeout_seconds, tiers.log, reads_memory=reads_memory
            )
            if transport is not None:
                control.call_on_failure(transport.abort)
                if not transport.breaks:
                    control.watch()
            communicators = self._communicators = Communicators(transport, built.layout.mesh, built.layout.groups)
            self.state = TrainingState(model, built.layout, options.stage, communicators, tiers)
            self.layers = _layers(built.layout)
            if built.layout.mesh.pipe > 1:
                self._tell_stages(control)
                self.open_links(compiled)
            weights = values.source(self.state.parameters, device, communicators)
            with allow_replacement(model):
                self.state.take_over(weights, compiled.plan)
        life.parameters = tuple(self.state.parameters.values())
        self.runtime = Runtime(built.layout, communicators, device, tiers)
        if self.runtime.notice:
            notify(self.runtime.notice)
        self.optimizer_state = OptimizerState(built.binding, self.state, control, life.check_trained)
        self._parked: Parked | None = None
        self._has_parameters = True  # all but the optimizer's states are where they were
        self._trained = {name: parameter.requires_grad for name, parameter in self.state.parameters.items()}
        self.guards: list[Any] = []
        self.watch_parameters()
        self._allocate(built.programs)

    @property
    def earlier(self) -> Earlier:
        """The results that further steps are built with."""
        return Earlier(self.layout, self.binding, self.state, self._shared)

    def _tell_stages(self, control: Control) -> None:
        """Have all stages know which of them has each parameter, and the layers of all, in order. Collective."""
        own, layers = self.state.own_parameters(), [*zip(self._shared.buckets, self.layers, strict=True)]
        of_ranks = control.gather((own, layers), "find the parameters of stages")
        stages = [of_ranks[rank] for rank in self.layout.mesh.first_of_stages]
        self.state.tell_stages([buckets for buckets, _ in stages])
        self.layers = tuple(layer for _, layer in sorted(itertools.chain.from_iterable(each for _, each in stages)))

    def open_links(self, compiled: CompiledStep) -> None:
        """Prepare for the messages between stages of a step, or an evaluation, that has been built. Collective."""
        if self.layout.mesh.pipe > 1:
            control, purpose = self._life.control, "prepare for messages between stages"
            of_ranks = control.gather([*order_on_links(compiled.lowered.graph)], purpose)
            with control.fail_together(purpose):
                self._communicators.open_links(sorted(set(itertools.chain.from_iterable(of_ranks))))

    def watch_parameters(self) -> None:
        """Watch the parameters that the model has now, and guard it where they have no values."""
        life, state = self._life, self.state
        self.watch = ParameterWatch(self.model)
        if not state.resident and not self.guards:
            self.guards = guard_model(self.model, lambda: life.showing or life.looked_at or state.resident)

    def find_changed(self) -> str:
        """The parameters whose ``requires_grad`` differs from that when the model was taken over, in words."""
        parameters = self.state.parameters
        with without_torch_functions():  # which parameters that are held have
            if all(map(operator.is_, map(_IS_TRAINED, parameters.values()), self._trained.values())):
                return ""
            now = {name: parameter.requires_grad for name, parameter in parameters.items()}
        kinds = {"trained": True, "frozen": False}
        changed = {
            word: [n for n, flag in now.items() if flag != self._trained[n] and flag is to]
            for word, to in kinds.items()
        }
        return " and ".join(f"{first_few(of_kind)} to be {word}" for word, of_kind in changed.items() if of_kind)

    def tensors(self, arguments: StepArguments) -> dict[str, torch.Tensor]:
        """The tensors that a step reads and writes besides its batch, by name."""
        return state_tensors(arguments, self.model, self.state, self._outside, self.scaler, self._read_lent())

    def held_bytes(self, arguments: StepArguments) -> dict[str, int]:
        """Bytes that this rank holds between steps, by tier: the device's, and others' that are used now."""
        self._tiers.finish_updates()
        slower = {tier: size for tier, size in self._tiers.held_bytes.items() if size}
        tensors = dict(arguments.constants) if self.is_parked else self.tensors(arguments)
        return {"device": persistent_bytes(tensors.values()) + self.runtime.arena.num_bytes, **slower}

    @property
    def is_parked(self) -> bool:
        """True from ``park`` until values are brought up."""
        return not self._has_parameters

    def park(self, tier: SlowerTier, *, states_alone: bool = False) -> None:
        """Give the device's memory back: what lies there waits in ``tier``, or the optimizer's states do. Collective.

        Raises:
            TierError: that has no room for it; nothing has been changed.
        """
        life, purpose = self._life, "park the optimizer's states" if states_alone else "park the step"
        with life.control.fail_together(purpose), torch.no_grad():
            self.optimizer_state.take_loaded()
            self.state.flush()
        tensors = list(self.state.states_on_device() if states_alone else self.state.tensors_on_device())
        num_ranks = len(life.control.ranks_of_host(purpose))

        def move() -> Parked:
            if tier == "nvme":
                moved = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
                self._tiers.prepare({tier: self._tiers.held_bytes[tier] + sum(moved.values())}, num_ranks)
            return Parked(tensors, self._tiers, tier)

        self._parked, self.state.bring_up = life.control.attempt(purpose, move), self.unpark
        self._has_parameters = states_alone
        self.runtime.arena.clear()
        self.watch.renew()

    def unpark(self) -> None:
        """Bring up what ``park`` has moved, if it has. Collective."""
        if self._parked is None:
            return
        life, purpose = self._life, "bring a parked step up"
        life.control.meet(purpose)
        parked, self._parked, self.state.bring_up = self._parked, None, do_nothing
        moved_slices, self._has_parameters = not self._has_parameters, True
        over = life.end_on_error("a parked step could not be brought up")
        with over, life.control.fail_together(purpose), torch.no_grad():
            parked.restore()
            if moved_slices:
                self.state.share()
        self.watch.renew()

    def place(self, plan: Plan) -> None:
        """Move states and parameters to where ``plan`` has them between steps."""
        if self.state.place(plan):
            self.state.hide_parameters()
            self.watch_parameters()

    def advance(self) -> Advance:
        """The coming step's scalars; the update is traced anew where the optimizer's options or states ask for it."""
        for optimizer in self.binding.optimizers.each:
            check_step_hooks(optimizer)
        self.optimizer_state.take_loaded()
        coming = advance(self.binding, self.state)
        if coming is None:
            self._allocate(self.binding.programs(self.state.buckets))
            coming = advance(self.binding, self.state)
            assert coming is not None, "the update has been traced for the options that hold now"
        return coming

    def _allocate(self, programs: Mapping[int, UpdateProgram]) -> None:
        """Make the states that updates begin with."""
        self.state.set_owners(programs)
        self.runtime.owners = self.state.owners
        for index, program in programs.items():
            self.state.new_states(self.layout.buckets[index], program, self.device)

    def versions(self) -> dict[int, int]:
        """Update counts of each bucket's stored values: they tell which were updated in a step that failed."""
        return {b.index: self.state.buckets[b.index].version for b in self.layout.buckets if b.trainable}

    def finish_step(self, warm_up: int, num_steps: int, plan: Plan) -> None:
        """After step ``num_steps``: leave delayed updates to the host, or finish them in the first ``warm_up``."""
        self.mark_stepped()
        if any(decision.delayed for decision in plan.states):
            self.state.count_delayed()
            if num_steps <= warm_up:
                self.state.flush()

    def update_scale(self, *, is_finite: bool) -> None:
        """After a step whose loss is scaled, whose gradients were all finite or not."""
        if self.scaler is not None:
            self.scaler.update(is_finite=is_finite)

    def mark_stepped(self) -> None:
        """Say that the optimizers' step has been done: torch's schedulers warn where they are stepped before it."""
        for optimizer in self.binding.optimizers.each:
            note_step(optimizer)

    def find_updated(self, before: Mapping[int, int]) -> list[int]:
        """The buckets that have been updated since their ``versions`` were ``before``."""
        now = self.versions()
        return [index for index in before if now[index] != before[index]]

    @property
    def training(self) -> Training:
        """The state that a checkpoint is taken of."""
        binding = self.binding
        return Training(
            self.model, binding.optimizers, self.state, self._tiers, self._life.control, binding.whole_groups
        )

    def load(self, source: Source, name: str, then: Callable[[], None], *, optimizer: bool = True) -> None:
        """Take parameters, and the optimizer's states, over from ``source``, which fits, and do what is to follow.

        Collective. Where this fails, what is in memory is a mixture, and the step is over. ``name`` says what was
        loaded.
        """
        over = self._life.end_on_error(f"{name} was loaded in part")
        with over, self._life.control.fail_together(f"load {name}"), torch.no_grad():
            self.optimizer_state.take_loaded()
            self.state.flush()
            fill_training(source, self.training, optimizer=optimizer)
            then()
            self._allocate(self.binding.programs(self.state.buckets))

    @contextmanager
    def show_whole(self, *, write_back: bool) -> Iterator[None]:
        """While open, the model has its whole parameters; collective. ``write_back``: they are trained on from there.

        Where the block raises, nothing is written back.
        """
        life, state = self._life, self.state
        with life.claim("enter full_parameters()"):
            life.check_world()
            life.control.meet("enter full_parameters()")
            with life.control.fail_together("show the whole parameters"):
                state.flush()
                if not state.resident:
                    state.show_parameters()
            life.showing, done = True, False
        try:
            yield
            done = True
        finally:
            with life.claim("leave full_parameters()", waits=True):
                life.showing = False
                try:
                    if write_back and done:
                        state.write_back()
                finally:
                    state.hide_parameters()
                    self.watch.renew()  # what the block has replaced is for the next step to tell

    @contextmanager
    def show_to_generate(self, tier: SlowerTier, budget: int | None, num_bytes: Callable[[], int]) -> Iterator[None]:
        """While open, the optimizer's states wait in ``tier``, and the model can be called; collective.

        It has its whole parameters where ``budget`` has room for them besides the ``num_bytes`` that the step has on
        the device then, on all ranks; else those of a bucket at a time.

        Raises:
            TierError: the tier has no room for the states; nothing has been changed.
        """
        life, state, purpose = self._life, self.state, "generate"
        with ExitStack() as stack:
            with life.claim(purpose):
                life.check_world()
                life.control.agree(purpose, tier, "tiers for states", "Give every rank the same.")
                self.park(tier, states_alone=True)
                try:
                    fits = state.resident or budget is None or num_bytes() + state.whole_bytes() <= budget
                    is_whole = all(life.control.gather(fits, purpose))
                    with life.control.fail_together(purpose), torch.no_grad():
                        if not is_whole:
                            stack.enter_context(gather_on_demand(state))
                        elif not state.resident:
                            state.show_parameters()
                except BaseException:
                    state.hide_parameters()
                    self.unpark()
                    raise
                life.showing = True
            try:
                with stack:
                    yield
            finally:
                with life.claim("end generating", waits=True):
                    life.showing = False
                    state.hide_parameters()
                    self.watch.renew()
                    self.unpark()

    @contextmanager
    def show_averages(self) -> Iterator[None]:
        """While open, parameters have the values of their averages, in slices; collective.

        Raises:
            UsageError: there is no average, or no step has entered it yet.
        """
        life, state, average = self._life, self.state, self.binding.optimizers.average
        purpose = "enter averaged_parameters()"
        if average is None:
            raise UsageError(
                f"expected to {purpose} with average= given to zerofx.compile, found None: give EMA(), say"
            )
        with life.claim(purpose), torch.no_grad():
            life.check_world()
            life.control.meet(purpose)
            with life.control.fail_together(purpose):
                self.optimizer_state.take_loaded()
                state.flush()
                if not all(life.control.gather(state.has_averages(average.after), purpose)):
                    raise UsageError(f"expected to {purpose} once a step has entered {average}, found that none has")
                self._swap()
        try:
            yield
        finally:
            with life.claim("leave averaged_parameters()", waits=True), torch.no_grad():
                self._swap()

    def _swap(self) -> None:
        """Exchange parameters and their averages; where that fails on this rank, the step is over."""
        with self._life.end_on_error("averages were put in the place of parameters in part"):
            self.state.swap_averages()
        self._life.averaged = not self._life.averaged
        self.watch.renew()

    def give_back(self) -> None:
        """Give model and optimizers all their values back; collective."""
        self.state.flush()
        self.state.show_parameters()
        self.optimizer_state.give_back()

    def outcome_left(self) -> list[torch.Tensor]:
        """The outcome of a step that was left before its updates, whose collectives have ended: its loss at least."""
        self.runtime.finish_collectives()
        self.runtime.tiers.settle()
        outcome, self.runtime.stopped = self.runtime.stopped, None
        assert outcome is not None
        return own_memory(outcome)


def _layers(layout: BucketLayout) -> tuple[str, ...]:
    """The layer of each trained bucket, or the place between two. Slices are of a parameter's layer."""
    units = {bucket.unit for bucket in layout.buckets if not bucket.is_slice}
    return tuple(
        unit_of(source, units) or source if bucket.is_slice and (source := bucket.slots[0].source) else bucket.name
        for bucket in layout.buckets
        if bucket.trainable
    )


class Awaited:
    """Has put stand-ins of what was saved into ``optimizer.state``, by which the update is captured.

    They take no memory. Until the first step has been prepared, ``optimizer.state_dict()`` and ``load_state_dict()``
    are refused.
    """

    def __init__(self, checked: Loadable, model: nn.Module, optimizers: Optimizers) -> None:
        self._checked = checked
        self._handles: list[Any] = []
        for optimizer in optimizers.each:
            if isinstance(optimizer, NestedOptimizer):
                optimizer.state = StatesAway(_refuse)
            else:
                optimizer.state.clear()
            for member in members_with_state_hooks(optimizer):
                self._handles.append(member.register_state_dict_pre_hook(_refuse))
                self._handles.append(member.register_load_state_dict_pre_hook(_refuse))
        parameters, holders = dict(named_parameters(model)), optimizers.holders()
        for own, entry in entries_of(checked, parameters).items():
            optimizers.each[holders.get(id(parameters[own]), 0)].state[parameters[own]] = entry

    def take_over(self, taken: TakenOver) -> None:
        """Give a model and optimizers that have just been taken over their values. Collective."""
        checked = self._checked
        taken.load(checked, str(checked.reader.place), lambda: load_buffers(checked))

    def end(self) -> None:
        """The states are where they belong, or another checkpoint has been loaded."""
        for handle in self._handles:
            handle.remove()
        self._checked.reader.close()


def _refuse(*_: Any) -> None:
    raise UsageError(
        "expected the optimizer's states to be asked for, or set, once those of the loaded checkpoint have their "
        "place, found that no step has been prepared since: call step.prepare(batch) first"
    )
