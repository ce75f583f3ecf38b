"""Add the optimizer to the graph: each bucket is updated as soon as its reduced gradient exists.

    grad_0 = wait(reduce_0, grads_0)        grad_0 = wait(reduce_0, grads_0)
                                            # hyper_0, made where the step begins: lr and the like of this step
                                            mul_(exp_avg_0, ...); ...               # the optimizer's own operators,
                                            addcdiv_(shard_0, exp_avg_0, ...)       # in place on the flat slice
                                            gather_into_0 = all_gather_into(params_0, shard_0)      # stages 1 and 2
                                            ...
                                            wait(gather_into_0)                     # where the step ends

On a mesh a rank may update a part of a slice, whose parts are on other replicas: new values rise part by part, first
into the slice, at stage 3 the one that is gathered in the next step, and at stages 1 and 2 from there into the whole:

    gather_part_0 = all_gather_into(shard_0, part_0, over='replicate')
    ...                                                                 # the next update, or where the step ends
    wait(gather_part_0)
    gather_into_0 = all_gather_into(params_0, shard_0)

Where the compute dtype is lower than the stored one, the update works on the fp32 master slice with the gradient cast
to its dtype, and the new values are cast into the slice that the graph computes with. Neither a whole buffer that stays
on the device nor a slice that is gathered is touched before its last reader of this step has run.

Where gradients are clipped or unscaled (``passes/barrier``) all updates stand where the step ends, one after the other,
and each gradient is multiplied by the factor, or first by the scale's inverse and then by the factor, once it is in the
dtype of the master:

    mul_(grad_0, clip); ...; addcdiv_(shard_0, exp_avg_0, ...); mul_(grad_1, clip); ...

Of a bucket without a reduction, as all are of an evaluation, states and masters are inputs that nothing reads: they are
there, and count.

Where an update needs whole parameters, their owners have them put together, step on them, and send them back
(``passes/lib/whole_updates.py``).

Does not handle: updates of whole parameters on the host, or delayed. States in a slower tier are brought to their
update as ``passes/lib/placed_states.py`` says; those of an optimizer that combines parameters where the step ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call
from zerofx.ir.facts import (
    DEVICE,
    Origin,
    Phase,
    Role,
    placeholder,
    tensor,
    tier_of,
)
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.passes.lib.inlined_updates import (
    HYPERPARAMETERS,
    copy_to_host,
    gradient_factors,
    insert_update,
    update_on_host,
)
from zerofx.passes.lib.placed_states import (
    HOST,
    PlacedStates,
    Started,
    await_copies,
    copy_into,
    descend_early,
    empty_on_host,
    leads_to_nvme,
    may_run_on,
    new_values,
    state_decision,
)
from zerofx.passes.lib.rising import Rising, RisingGather, finish, go_on, start, update_target
from zerofx.passes.lib.update_inputs import add_hyperparameters, add_stored
from zerofx.passes.lib.whole_updates import Given, WholeUpdates
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """Inline each bucket's update program after its reduction. ``programs`` is keyed by bucket index."""

    layout: BucketLayout
    programs: Mapping[int, UpdateProgram] = field(hash=False)
    name: str = "update"

    def run(self, step: StepGraph, plan: Plan) -> None:
        begin, factors = step.updates_begin, gradient_factors(step)
        if begin is not None:
            descend_early(step, plan, self.layout)
            factors |= copy_to_host(step, plan, factors[DEVICE])
        whole = WholeUpdates(step, plan, self.layout, self.programs, factors[DEVICE])
        updates = _Updates(step, plan, factors, whole)
        for bucket in self._update_order(step, plan):
            last = step.output.prev
            updates.add(bucket, self.programs[bucket.index], begin)
            if begin is not None and state_decision(plan, bucket) is not None:
                begin = last.next
        for index in sorted(self.programs.keys() - {decision.bucket for decision in plan.reduces}):
            bucket = self.layout.buckets[index]
            master = updates.known.find(Role.MASTER, bucket)
            add_stored(step, plan, bucket, self.programs[index], master, whole.sizes.get(index))
        updates.finish()

    def _update_order(self, step: StepGraph, plan: Plan) -> list[Bucket]:
        """The buckets in the order of their updates: that of their reductions.

        Where all updates stand at the step's end, what the host may go on with in the next one comes first, as that
        needs it, and what is on the device before what has to come up, which it hides.
        """
        buckets = [self.layout.buckets[decision.bucket] for decision in plan.reduces]
        if step.updates_begin is None:
            return buckets
        order, uses = step.positions(), dict[int | None, int]()
        for node in step.placeholders():
            facts, readers = placeholder(node), consumers(node)
            if facts.role in (Role.FULL, Role.SHARD) and readers:
                uses[facts.bucket] = min([uses.get(facts.bucket, len(order)), *map(order.__getitem__, readers)])

        def turn(bucket: Bucket) -> tuple[int, int]:
            decision = state_decision(plan, bucket)
            if decision is None:
                return 1, 0
            runs_on = (decision.tier, decision.update) == (HOST, HOST) and may_run_on(plan, bucket)
            return (0, uses.get(bucket.index, 0)) if runs_on else (2, 0)

        return sorted(buckets, key=turn)


@dataclass(frozen=True)
class _Known:
    """Nodes that updates ask for: by name, and placeholders by role and bucket."""

    by_name: Mapping[str, fx.Node]
    placeholders: Mapping[tuple[Role, int | None], fx.Node]

    @staticmethod
    def from_step(step: StepGraph) -> _Known:
        """Those of ``step`` as it is before the first update."""
        placeholders = {(placeholder(node).role, placeholder(node).bucket): node for node in step.placeholders()}
        return _Known(step.nodes_by_name(), placeholders)

    def find(self, role: Role, bucket: Bucket) -> fx.Node | None:
        """A bucket's placeholder, if there is one."""
        return self.placeholders.get((role, bucket.index))


@dataclass(frozen=True)
class _Updated:
    """The inputs of one bucket's update.

    ``low``: the parameters in the compute dtype, which ``levels`` gather for other ranks. ``stored``: states by name,
    and as ``param`` the ``master`` if there is one. ``delayed``: what a delayed update has on the host. ``scalars``:
    what it reads of this step.
    """

    bucket: Bucket
    program: UpdateProgram
    low: fx.Node
    levels: tuple[RisingGather, ...]
    stored: dict[str, fx.Node]
    master: fx.Node | None
    delayed: dict[str, fx.Node]
    scalars: dict[str, fx.Node]

    @property
    def origin(self) -> Origin:
        return Origin(self.bucket.name, Phase.UPDATE)


@dataclass(frozen=True)
class _OnHost:
    """An update that the host is given: the copies of its results, what it reads until it is done, and what gathers
    the new values for other ranks then.

    ``num_ahead``: how many more may be started before it is awaited; None for all.
    """

    bucket: Bucket
    copies: tuple[Started, ...]
    held: tuple[fx.Node, ...]
    levels: tuple[RisingGather, ...]
    num_ahead: int | None


class _Updates:
    """The updates of a step, put in one after the other, and what is under way from one to the next.

    ``factors`` are what gradients are multiplied by, one after the other, by the tier that they are on.
    """

    def __init__(
        self,
        step: StepGraph,
        plan: Plan,
        factors: Mapping[str, Sequence[fx.Node]],
        whole: WholeUpdates,
    ) -> None:
        self._step, self._plan, self._factors, self._whole = step, plan, factors, whole
        self.known = _Known.from_step(step)
        self._copies: list[Started] = []  # still to be awaited
        self._back: dict[int, list[Started]] = {}  # what goes back and runs on into the next step, by bucket
        self._on_host: list[_OnHost] = []  # likewise
        self._rising: list[Rising] = []  # gathers of new values, where other ranks need them
        self._written: dict[int, fx.Node] = {}  # the last wait for what each bucket copies back

    def add(self, bucket: Bucket, program: UpdateProgram, begin: fx.Node | None) -> None:
        """Insert the update of a bucket; ``begin``: where states start on their way that the plan says nothing of."""
        decision = state_decision(self._plan, bucket)
        if program.whole and decision is not None and decision.update == HOST:
            raise PlanError(
                f"expected the update of {bucket.name} on the device, found it on the host: whole parameters of "
                f"{program.optimizer} are updated there alone; make the plan anew"
            )
        full = self.known.find(Role.FULL, bucket)
        updated = self._inputs_of(bucket, program, full)
        end, free = self._place(updated, full), None
        if program.joint is not None and decision is not None:
            end = begin = self._step.output  # one update needs all of these states, and not before
        elif program.whole:
            end = self._whole.place(end)
        if decision is not None and decision.takes_over is not None:
            # Where that bucket's buffers are free only after this update's place, there is no time to read ahead.
            free = min(self._written.get(decision.takes_over, end.prev), end.prev)
        placed = PlacedStates(self._step, self.known.by_name, bucket, updated.stored, decision, free, begin)
        go_on(self._step, self._rising, end)
        with self._step.graph.inserting_before(end):
            ready = [copy for copy in self._copies if copy.node < end]  # nodes compare by their place in the graph
            self._copies = [copy for copy in self._copies if not copy.node < end]
            if decision is not None and decision.update == HOST:
                # What is written to nvme is still being written while the next bucket is updated.
                meanwhile = [copy for copy in ready if leads_to_nvme(copy)]
                self._await([copy for copy in ready if copy not in meanwhile])
                if updated.delayed:
                    self._run_later(updated)
                else:
                    self._run_on_host(updated, placed, at_once=decision.at_once)
                self._settle_earlier()
                self._await(meanwhile)
            else:
                self._await(ready)
                self._run(updated, placed)

    def finish(self) -> None:
        """Await what is under way, where the step ends."""
        with self._step.graph.inserting_before(self._step.output):
            self._whole.finish()
            await_copies(self._step, self._copies)
            for update in self._on_host:
                if update.num_ahead is None and may_run_on(self._plan, update.bucket):
                    self._run_on(update.bucket, update.copies, update.held)
                else:
                    self._settle(update)
            for copies in self._back.values():
                self._run_on(copies[0].bucket, copies, back=True)
        finish(self._step, self._rising)

    def _inputs_of(self, bucket: Bucket, program: UpdateProgram, full: fx.Node | None) -> _Updated:
        step, plan = self._step, self._plan
        low, levels = update_target(step, plan, bucket, full, self.known.find(Role.SHARD, bucket))
        master, owned = self.known.find(Role.MASTER, bucket), self._whole.sizes.get(bucket.index)
        stored, delayed, scalars = add_stored(step, plan, bucket, program, master, owned)
        master = stored.get("param")
        if master is None and tier_of(low) != DEVICE:
            stored["param"] = low
        if not program.whole:
            scalars[HYPERPARAMETERS] = add_hyperparameters(step, bucket, program)
        return _Updated(bucket, program, low, levels, stored, master, delayed, scalars)

    def _place(self, updated: _Updated, full: fx.Node | None) -> fx.Node:
        """The node before which the update stands."""
        step, levels = self._step, updated.levels
        if step.updates_begin is not None:
            return step.output
        reduced = step.reduced[updated.bucket.index]
        # A gather reads the slice until it is done; its own readers, the release among them, come after that.
        gathered = levels[0].into if levels else updated.low
        readers = consumers(full) if full is not None else _readers_of_gathered(gathered)
        return end_of_unit(step, max([reduced, *consumers(reduced), *readers])).next

    def _run_later(self, updated: _Updated) -> None:
        """Let the host run the update by itself, once it is done with that of the step before."""
        step, bucket, low, master = self._step, updated.bucket, updated.low, updated.master
        assert master is not None, "what is updated on the host, and lives on the device, has a master there"
        insert_call(step.graph, ops.settle, (bucket.index,), updated.origin, name=f"settled_{bucket.index}")
        up = copy_into(step, bucket, low, updated.delayed.get("low", master))
        self._copies.append(copy_into(step, bucket, updated.delayed["grad"], step.reduced[bucket.index]))
        known = updated.stored | updated.scalars | updated.delayed
        new = known.get("low", master)
        update_on_host(step, bucket, updated.program, known, updated.origin, new=new, delayed=True)
        self._leave([up], at_once=bool(updated.levels))  # the gather below reads it
        self._rising += start(step, bucket, updated.levels)

    def _run(self, updated: _Updated, placed: PlacedStates) -> None:
        """Run the update on the device, where it stands."""
        step, bucket, low, where = self._step, updated.bucket, updated.low, updated.origin
        tensors, grad = placed.await_reloads(), step.reduced[updated.bucket.index]
        known = {"param": low, **tensors, **updated.scalars, "grad": grad}
        if not updated.program.whole:
            insert_update(step, bucket, updated.program, known, where, DEVICE, self._factors[DEVICE])
            self._hand_on(updated, placed, tensors)
            return
        # What is updated where it lies in slices has its new values only when they are back there.
        late = {"param"} if bucket.is_cut(self._plan.stage) and not self._whole.are_kept(bucket) else set()
        self._whole.add(
            Given(
                bucket,
                updated.program,
                known["param"],
                grad,
                tuple(tensors[state.name] for state in updated.program.states),
                tensor(low).numel(),
                is_done=lambda: self._leave_back(placed.write_back(tensors, late), at_once=placed.at_once),
                is_back=lambda new: self._hand_on(updated, placed, tensors, new, tensors.keys() - late),
            )
        )

    def _hand_on(
        self,
        updated: _Updated,
        placed: PlacedStates,
        tensors: Mapping[str, fx.Node],
        new: fx.Node | None = None,
        left: Collection[str] = (),
    ) -> None:
        """Copy, after an update on the device, its results to where they belong, without those ``left``, and gather
        new values: ``new``, or else those that have been updated."""
        step, bucket, low = self._step, updated.bucket, updated.low
        up = [] if updated.master is None else new_values(step, bucket, low, tensors["param"] if new is None else new)
        self._leave(up, at_once=bool(updated.levels))  # the gather below reads it
        self._leave_back(placed.write_back(tensors, left), at_once=placed.at_once)
        self._rising += start(step, bucket, updated.levels)

    def _run_on_host(self, updated: _Updated, placed: PlacedStates, *, at_once: bool) -> None:
        """Have the host run the update once the gradient is there; the copies of its results wait for it."""
        step, bucket, low, where = self._step, updated.bucket, updated.low, updated.origin
        tensors, grad = placed.await_reloads(), step.reduced[bucket.index]
        held = []
        if tier_of(grad) == DEVICE:
            reduced, grad = grad, empty_on_host(step, grad, where, grad.name + "_host")
            self._leave([copy_into(step, bucket, grad, reduced)], at_once=at_once)
        held.append(grad)
        new = stored = tensors.get("param", low)
        is_copied = updated.master is not None and tier_of(low) != HOST
        if updated.master is not None and not is_copied:
            new = low
        elif is_copied and tensor(low).dtype != tensor(stored).dtype:
            new = empty_on_host(step, low, where, low.name + "_host")
            held.append(new)
        program, known = updated.program, {"param": low, **tensors, **updated.scalars, "grad": grad}
        update_on_host(step, bucket, program, known, where, factors=self._factors.get(HOST, ()), new=new)
        up = [copy_into(step, bucket, low, new)] if is_copied else []
        if tier_of(low) == "nvme":  # the next step reads it long before states: it does not run on into that
            self._leave(up, at_once=at_once)
            up = []
        back = placed.write_back(tensors)
        to_nvme = [copy for copy in back if leads_to_nvme(copy)]
        # What comes from nvme has a few buffers on the host, and other ranks wait no longer than they need to.
        num_ahead = 1 if to_nvme else 2 if updated.levels else None
        copies = (*up, *(copy for copy in back if copy not in to_nvme))
        update = _OnHost(bucket, copies, tuple(held), updated.levels, num_ahead)
        self._leave_back(to_nvme, at_once=at_once)
        if at_once and to_nvme:
            self._settle(update)
        else:
            self._on_host.append(update)

    def _settle_earlier(self) -> None:
        """Settle updates that as many have been started after as may be under way."""
        for num_later, update in reversed(list(enumerate(reversed(self._on_host)))):
            if update.num_ahead is not None and num_later >= update.num_ahead:
                self._on_host.remove(update)
                self._settle(update)

    def _settle(self, update: _OnHost) -> None:
        """Await an update on the host, and what is copied of it, at the insertion point."""
        self._await(update.copies)
        args = (update.bucket.index, list(update.held))
        where = Origin(update.bucket.name, Phase.UPDATE)
        insert_call(self._step.graph, ops.settle, args, where, name=f"settled_{update.bucket.index}")
        self._rising += start(self._step, update.bucket, update.levels)

    def _run_on(
        self, bucket: Bucket, copies: Sequence[Started], held: Sequence[fx.Node] = (), *, back: bool = False
    ) -> None:
        """Let ``copies``, and the update on the host that they are of or else go ``back`` after, run on into the next
        step (``passes/settle.py``)."""
        sources = [copy.source for copy in copies if copy.source.op != "placeholder"]
        args = (bucket.index, [copy.node for copy in copies], list(dict.fromkeys([*held, *sources])))
        name, how = (f"run_back_{bucket.index}", {"back": True}) if back else (f"run_on_{bucket.index}", {})
        insert_call(self._step.graph, ops.run_on, args, Origin(bucket.name, Phase.UPDATE), how, name=name)

    def _await(self, copies: Sequence[Started]) -> None:
        self._written |= await_copies(self._step, copies)

    def _leave(self, copies: Sequence[Started], *, at_once: bool) -> None:
        """Await copies ``at_once``, or else where a later update stands."""
        if at_once:
            await_copies(self._step, copies)
        else:
            self._copies += copies

    def _leave_back(self, copies: Sequence[Started], *, at_once: bool) -> None:
        """The same of what goes back to its tier, which may run on into the next step."""
        decision = state_decision(self._plan, copies[0].bucket) if copies else None
        if decision is not None and decision.back_by is not None and not at_once:
            self._back.setdefault(decision.bucket, []).extend(copies)
        else:
            self._leave(copies, at_once=at_once)


def _readers_of_gathered(shard: fx.Node) -> list[fx.Node]:
    """All nodes that read a slice, or a bucket gathered from it; what starts or awaits a copy or a gather is one."""
    readers = consumers(shard)
    for node in readers:
        if node.target in (ops.reload, ops.all_gather):
            readers.extend(reader for reader in consumers(node) if reader not in readers)
    return readers
