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

Does not handle: optimizers that need whole tensors (refused when the optimizer is traced). States in a slower tier are
brought to their update as ``passes/lib/placed_states.py`` says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call
from zerofx.ir.facts import (
    DEVICE,
    Origin,
    Phase,
    Placeholder,
    Role,
    placeholder,
    set_delayed,
    set_tier,
    tensor,
    tier_of,
)
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.passes.lib.placed_states import (
    HOST,
    PlacedStates,
    Started,
    await_copies,
    copy_into,
    descend_early,
    leads_to_nvme,
    new_values,
    start_descent,
    state_decision,
)
from zerofx.passes.lib.rising import Rising, finish, go_on, start, what_is_updated
from zerofx.passes.shard import add_master, parameter_tier
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
_getitem = operator.getitem
_HYPER = "hyperparameters"


@dataclass(frozen=True)
class Update:
    """Inline each bucket's update program after its reduction. ``programs`` is keyed by bucket index."""

    layout: BucketLayout
    programs: Mapping[int, UpdateProgram] = field(hash=False)
    name: str = "update"

    def run(self, step: StepGraph, plan: Plan) -> None:
        rising: list[Rising] = []
        copies: list[Started] = []
        written: dict[int, fx.Node] = {}
        begin, factors = step.updates_begin, _factors(step)
        if begin is not None:
            descend_early(step, plan, self.layout)
            factors |= _on_host(step, plan, factors[DEVICE])
        known = _Known.of(step)
        for decision in plan.reduces:
            bucket, last = self.layout.buckets[decision.bucket], step.output.prev
            program = self.programs[bucket.index]
            copies = _update_bucket(step, plan, bucket, program, known, copies, rising, written, begin, factors)
            begin = None if begin is None else last.next
        for index in sorted(self.programs.keys() - {decision.bucket for decision in plan.reduces}):
            _add_stored(step, plan, self.layout.buckets[index], self.programs[index], known)
        with step.graph.inserting_before(step.output):
            await_copies(step, copies)
        finish(step, rising)


@dataclass(frozen=True)
class _Known:
    """Nodes that every bucket's update asks for: by name, and placeholders by role and bucket."""

    by_name: Mapping[str, fx.Node]
    placeholders: Mapping[tuple[Role, int | None], fx.Node]

    @staticmethod
    def of(step: StepGraph) -> _Known:
        """Those of ``step`` as it is before the first update."""
        placeholders = {(placeholder(node).role, placeholder(node).bucket): node for node in step.placeholders()}
        return _Known(step.by_name(), placeholders)


def _update_bucket(
    step: StepGraph,
    plan: Plan,
    bucket: Bucket,
    program: UpdateProgram,
    known: _Known,
    earlier: Sequence[Started],
    rising: list[Rising],
    written: dict[int, fx.Node],
    begin: fx.Node | None,
    factors: Mapping[str, Sequence[fx.Node]],
) -> list[Started]:
    """Insert the update after the waits of ``earlier`` copies; returns the copies that are still to be awaited.

    The started gather of the new values, where other ranks need them, is added to ``rising``, and the last wait for
    what a bucket copies back to ``written``. ``begin``: where states start on their way that the plan does not say it
    of. ``factors`` are what gradients are multiplied by, one after the other, by the tier that they are on.
    """
    graph, where = step.graph, Origin(bucket.name, Phase.UPDATE)
    decision = state_decision(plan, bucket)
    side = DEVICE if decision is None else decision.update
    on_host = side == HOST
    full = known.placeholders.get((Role.FULL, bucket.index))
    low, levels = what_is_updated(step, plan, bucket, full, known.placeholders.get((Role.SHARD, bucket.index)))
    away = tier_of(low) != DEVICE
    stored, delayed, scalars = _add_stored(step, plan, bucket, program, known)
    master = stored.get("param")
    if master is None and away:
        stored["param"] = low
    scalars[_HYPER] = _add_hyperparameters(step, bucket, program)
    reduced = step.reduced[bucket.index]
    # A gather reads the slice until it is done; its own readers, the release among them, come after that.
    readers = consumers(full) if full is not None else _readers_of_gathered(levels[0].into if levels else low)
    # Nodes compare by their place in the graph.
    end = end_of_unit(step, max([reduced, *consumers(reduced), *readers])).next
    if step.updates_begin is not None:
        end = step.output
    free = None
    if decision is not None and decision.takes_over is not None:
        # Where that bucket's buffers are free only after this update's place, there is no time to read ahead.
        free = min(written.get(decision.takes_over, end.prev), end.prev)
    placed = PlacedStates(step, known.by_name, bucket, stored, decision, free, begin)
    go_on(step, rising, end)
    with graph.inserting_before(end):
        # What is written to nvme is still being written while the next bucket is updated on the host.
        meanwhile = [reload for reload in earlier if reload.node < end and on_host and leads_to_nvme(reload)]
        written |= await_copies(step, [reload for reload in earlier if reload.node < end and reload not in meanwhile])
        left = [reload for reload in earlier if not reload.node < end]
        if delayed:
            assert master is not None, "what is updated on the host, and lives on the device, has a master there"
            insert_call(graph, ops.settle, (bucket.index,), where, name=f"settled_{bucket.index}")
            new = copy_into(step, bucket, low, delayed.get("low", master))
            left.append(copy_into(step, bucket, delayed["grad"], reduced))
            _update_later(step, bucket, program, stored | scalars | delayed, where)
            if levels:
                await_copies(step, [new])  # the gather below reads it
                rising += start(step, bucket, levels)
            else:
                left.append(new)
            return left
        tensors = placed.await_reloads()
        grad = reduced
        if on_host and tier_of(reduced) == DEVICE:
            grad = start_descent(step, bucket, reduced).finish(step)
        tier = HOST if on_host else DEVICE
        if tensor(grad).dtype != bucket.dtype:
            grad = set_tier(insert_call(graph, _aten._to_copy.default, (grad,), where, {"dtype": bucket.dtype}), tier)
        for factor in factors.get(tier, ()):
            set_tier(insert_call(graph, _aten.mul_.Tensor, (grad, factor), where), tier)
        _inline(step, program, {"param": low, **tensors, **scalars, "grad": grad}, where, tier)
        written |= await_copies(step, meanwhile)
        if master is not None:
            up = new_values(step, bucket, low, tensors["param"], side)
            if levels:
                await_copies(step, up)  # the gather below reads it
            else:
                left += up
        down = placed.write_back(tensors)
        if placed.at_once:
            await_copies(step, down)
        else:
            left += down
        rising += start(step, bucket, levels)
    return left


def _factors(step: StepGraph) -> dict[str, list[fx.Node]]:
    """What gradients on the device are multiplied by, one after the other, as ``unscale_`` and then clipping do."""
    inverse = [] if step.unscaling is None else [step.unscaling.inverse]
    return {DEVICE: inverse + ([] if step.clipping is None else [step.clipping.factor])}


def _on_host(step: StepGraph, plan: Plan, factors: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """``factors``, copied to the host where the step ends, if something is updated there."""
    if all(decision.update != HOST for decision in plan.states):
        return {}
    graph, where, copies = step.graph, Origin("", Phase.UPDATE), []
    with graph.inserting_before(step.output):
        for factor in factors:
            # What is offloaded is not read on the device again, as the factor itself may be.
            copy = insert_call(graph, _aten.clone.default, (factor,), where, name=f"{factor.name}_copy")
            name = f"{factor.name}_offload"
            down = set_tier(insert_call(graph, ops.offload, (copy, HOST), where, name=name), HOST)
            copies.append(set_tier(insert_call(graph, ops.wait, (down, copy), where, name=f"{factor.name}_down"), HOST))
    return {HOST: copies}


def _add_stored(
    step: StepGraph, plan: Plan, bucket: Bucket, program: UpdateProgram, known: _Known
) -> tuple[dict[str, fx.Node], dict[str, fx.Node], dict[str, fx.Node]]:
    """What stays of a bucket between steps besides its parameters: states, and the master as ``param`` if there is one;
    what a delayed update has on the host; and the scalar states that a kernel reads on the device."""
    decision, local = state_decision(plan, bucket), bucket.updated_numel(plan.stage)
    master = known.placeholders.get((Role.MASTER, bucket.index))
    on_host = decision is not None and decision.update == HOST
    if master is None and on_host and parameter_tier(plan, bucket) == DEVICE:
        master = add_master(step, bucket, local)
    stored = _add_states(step, bucket, program, local) | ({} if master is None else {"param": master})
    for node in stored.values():
        set_tier(node, DEVICE if decision is None else decision.tier)
    delayed = _add_delayed(step, bucket, local) if decision is not None and decision.delayed else {}
    return stored, delayed, _add_scalars(step, bucket, program)


def _add_delayed(step: StepGraph, bucket: Bucket, local: int) -> dict[str, fx.Node]:
    """What stays on the host from one step to the next for a delayed update: the gradient as it is reduced, and the
    parameters' new values in the compute dtype where the master has them in another."""
    dtypes = {"grad": bucket.reduce_dtype} | ({"low": bucket.compute_dtype} if bucket.has_master else {})
    return {
        name: set_tier(
            step.add_placeholder(
                f"{name}_{bucket.index}_host", Placeholder(Role.DELAYED, name, bucket.index), (local,), dtype
            ),
            HOST,
        )
        for name, dtype in dtypes.items()
    }


def _update_later(
    step: StepGraph, bucket: Bucket, program: UpdateProgram, known: Mapping[str, fx.Node], where: Origin
) -> None:
    """Insert the update that the host runs by itself, and the cast of the new values where there is one."""
    grad = known["grad"]
    added = []
    if tensor(grad).dtype != bucket.dtype:
        grad = insert_call(step.graph, _aten._to_copy.default, (grad,), where, {"dtype": bucket.dtype})
        added.append(set_tier(grad, HOST))
    added += _inline(step, program, {**known, "grad": grad}, where, HOST)
    if "low" in known:
        cast = insert_call(step.graph, _aten.copy_.default, (known["low"], known["param"]), where)
        added.append(set_tier(cast, HOST))
    for node in added:
        set_delayed(node, bucket.index)


def _add_states(step: StepGraph, bucket: Bucket, program: UpdateProgram, local: int) -> dict[str, fx.Node]:
    return {
        state.name: step.add_placeholder(
            f"{state.name}_{bucket.index}", Placeholder(Role.STATE, state.name, bucket.index), (local,), state.dtype
        )
        for state in program.states
    }


def _add_scalars(step: StepGraph, bucket: Bucket, program: UpdateProgram) -> dict[str, fx.Node]:
    """The scalar states that a kernel reads on the device."""
    scalars = {}
    for scalar in program.scalar_states:
        if scalar.name in program.tensor_scalars:
            assert scalar.dtype is not None, "what a kernel reads on the device is a tensor"
            scalars[scalar.name] = step.add_placeholder(
                f"{scalar.name}_{bucket.index}", Placeholder(Role.SCALAR_STATE, scalar.name, bucket.index), (),
                scalar.dtype,
            )  # fmt: skip
    return scalars


def _add_hyperparameters(step: StepGraph, bucket: Bucket, program: UpdateProgram) -> fx.Node:
    """This step's scalars."""
    with step.graph.inserting_after(step.last_placeholder()):
        return insert_call(
            step.graph, ops.hyperparameters, (bucket.index, program.num_scalars), Origin(bucket.name, Phase.UPDATE),
            name=f"hyper_{bucket.index}",
        )  # fmt: skip


def _inline(
    step: StepGraph, program: UpdateProgram, known: Mapping[str, fx.Node], where: Origin, tier: str
) -> list[fx.Node]:
    """Copy the program's operators into the step at the insertion point, to run where ``tier`` is; returns them."""
    added = []
    env: dict[fx.Node, fx.Node] = {}
    num_scalars = 0
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in known:
            env[node] = known[node.target]
        elif node.op == "placeholder":
            env[node] = insert_call(step.graph, _getitem, (known[_HYPER], num_scalars), where)
            num_scalars += 1
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = set_tier(insert_call(step.graph, node.target, tuple(args), where, dict(kwargs)), tier)
            added.append(env[node])
    return added


def _readers_of_gathered(shard: fx.Node) -> list[fx.Node]:
    """All nodes that read a slice, or a bucket gathered from it; what starts or awaits a copy or a gather is one."""
    readers = consumers(shard)
    for node in readers:
        if node.target in (ops.reload, ops.all_gather):
            readers.extend(reader for reader in consumers(node) if reader not in readers)
    return readers
