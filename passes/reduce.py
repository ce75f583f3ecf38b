"""Reduce each bucket's gradients as soon as the last of them exists.

    gw = mm(gy, x)                  grads_0 = empty_gradients(0, ...)          # where backward enters the unit
    gb = sum(gy)                    gw = mm(gy, x);   copy_(as_strided(grads_0, ...), gw)
    ...                             gb = sum(gy);     copy_(as_strided(grads_0, ...), gb)
    return loss, gw, gb             reduce_0 = reduce_scatter(grads_0, 0, 2)
                                    ...                                        # where the plan says
                                    grad_0 = wait(reduce_0, grads_0); div_(grad_0, 2)

With several micro-batches the first one's gradients are copied into the buffer and those of the others added to it, in
order, so that gradients take no memory but the buffer's; it is reduced once, after the last. Or each micro-batch has a
buffer of its own, as the plan says, and what stays is the sum of this rank's slices, in the dtype that it is updated in
(as FSDP2 does it):

    reduce_0 = reduce_scatter(grads_0, 0, 2)
    grad_0 = wait(reduce_0, grads_0); div_(grad_0, 2)
    sum_0 = _to_copy(grad_0, dtype=float32)                     # where that is another; else it is grad_0
    ...
    micro1_reduce_0 = reduce_scatter(micro1_grads_0, 0, 2)
    micro1_grad_0 = wait(micro1_reduce_0, micro1_grads_0); div_(micro1_grad_0, 2); add_(sum_0, micro1_grad_0)

A buffer has the dtype that gradients are reduced in, and what is copied or added to it is rounded to that (as FSDP2
does with ``reduce_dtype``).

The average over the ranks is the sum divided once. In float16, whose range a sum over many ranks would leave, gradients
are divided before it too, as FSDP2 does, by a power of two near the root of the number of ranks:

    div_(grads_0, 2); reduce_0 = reduce_scatter(grads_0, 0, 4); ...; grad_0 = wait(reduce_0, grads_0); div_(grad_0, 2)

Where every rank updates the whole bucket, as at stage 0: an all-reduce in its two halves, both of them in the buffer.

    reduce_0 = reduce_scatter_into(grads_0, 0, 2)
    ...
    grad_0 = wait(reduce_0, grads_0); div_(grad_0, 2)           # this rank's slice of the buffer
    gather_grad_0 = all_gather_into(grads_0, grad_0, 0)
    ...                                                         # where the plan says
    full_grad_0 = wait(gather_grad_0)

Nobody but a slice's own rank reads it before it is summed, and that rank has read all of them by then. On one rank the
flat buffer is the gradient.

Does not handle: a parameter without a gradient; the layout has put it in a bucket that is not trained. At stage 0
nothing is reduced by micro-batch: there each rank has all gradients for its update.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input, is_view, storage_source
from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.edit import consumers, end_of_unit, insert_call, node_named, skip_getitems, skip_releases, start_of_unit
from zerofx.ir.facts import Job, Origin, Phase, Task, is_random, origin, set_task
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import ends_of_backwards
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.reduced_gradients import divisors
from zerofx.scheduler.analysis.saved_values import outputs_of, storage_size
from zerofx.scheduler.plan.decisions import ReduceDecision, bucket_decisions
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
# Limits, as fractions of the bucket: most bytes live, and most bytes left over, before a deferred weight gradient.
_LITTLE, _NEXT_TO_NOTHING = 0.5, 0.125


@dataclass(frozen=True)
class Reduce:
    """Write gradients into flat buffers, reduce those, and leave the results in ``StepGraph.reduced``."""

    layout: BucketLayout
    name: str = "reduce"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order, shares = step.positions(), step.gradients_by_body
        by_name, ends = step.nodes_by_name(), ends_of_backwards(step)
        tails = _Tails()
        decided = {decision.bucket: decision for decision in plan.reduces}
        buffers: dict[int, list[fx.Node]] = {}
        for bucket in filter(lambda b: b.trainable, self.layout.buckets):
            members = [
                sorted(((gradients[slot.name], slot) for slot in bucket.slots), key=lambda m: order[m[0]])
                for gradients in shares
            ]
            each = _reduces_each(step, plan, bucket, decided[bucket.index])
            groups = [[member] for member in members] if each else [members]
            buffers[bucket.index] = [
                _fill_buffer(step, bucket, group, tails, _name(f"grads_{bucket.index}", number))
                for number, group in enumerate(groups)
            ]
        step.set_outputs(step.loss, step.mutations, {})
        # Every reduction is issued before one is placed after another's gradient, as decisions may ask.
        pending = {
            bucket.index: [
                _issue(step, plan, bucket, buffer, number if number < len(buffers[bucket.index]) - 1 else None)
                if bucket.num_reduced > 1
                else buffer
                for number, buffer in enumerate(buffers[bucket.index])
            ]
            for bucket in self.layout.buckets
            if bucket.trainable
        }

        def place(node_name: str | None, body: int | None = None) -> fx.Node:
            if node_name:
                return end_of_unit(step, tails.skip_outputs(node_named(by_name, node_name)))
            return (step.output if body is None else ends[body]).prev

        for decision in plan.reduces:
            bucket = self.layout.buckets[decision.bucket]
            *earlier, (buffer, started) = zip(buffers[bucket.index], pending[bucket.index], strict=True)
            partial = None
            for number, pair in enumerate(earlier):
                partial = _add(step, bucket, partial, *pair, place(decision.earlier[number], number), plan, number)
            if started is not buffer:
                started = _finish(step, plan, bucket, buffer, started, place(decision.wait_after), partial)
            step.reduced[bucket.index] = started
        _await_sums(step, plan, self.layout, place)


def _name(name: str, body: int) -> str:
    return f"micro{body}_{name}" if body else name


def _reduces_each(step: StepGraph, plan: Plan, bucket: Bucket, decision: ReduceDecision) -> bool:
    """True if each micro-batch's gradients are reduced separately.

    Raises:
        PlanError: they are to be where that cannot be.
    """
    if not decision.earlier:
        return False
    if not bucket.may_reduce_each(plan.stage) or len(decision.earlier) != step.num_bodies - 1:
        raise PlanError(
            f"expected {bucket.name} to be reduced in each of {step.num_bodies} bodies of micro-batches at stages 1 to "
            f"3, on several ranks, found {decision} at stage {plan.stage} on {plan.num_ranks}: make the plan anew"
        )
    if bucket_decisions(plan.gradients, bucket.index):
        raise PlanError(
            f"expected {bucket.name} to be reduced in each micro-batch or its gradients to wait elsewhere for the next "
            f"one, found both: make the plan anew"
        )
    return True


class _Tails:
    """The last node that has been put after each node of the graph, so that additions keep their order."""

    def __init__(self) -> None:
        self._last: dict[fx.Node, fx.Node] = {}

    def skip_outputs(self, node: fx.Node) -> fx.Node:
        anchor = node.args[0] if node.target is operator.getitem else node
        assert isinstance(anchor, fx.Node)
        return self._last.setdefault(anchor, skip_getitems(anchor))

    def add(self, node: fx.Node, added: fx.Node) -> None:
        anchor = node.args[0] if node.target is operator.getitem else node
        assert isinstance(anchor, fx.Node)
        self._last[anchor] = added


def _fill_buffer(
    step: StepGraph, bucket: Bucket, members: list[list[tuple[fx.Node, Slot]]], tails: _Tails, name: str
) -> fx.Node:
    """A gradient buffer of the bucket, filled with ``members``: some bodies' gradients in the order they arrive."""
    graph, first = step.graph, members[0][0][0]
    turns = _turns_in_unit(step, bucket, first)
    if turns:
        _put_off(step, first, [gradient for gradient, _ in members[0][1:]], bucket.gradient_bytes)
    with graph.inserting_before(tails.skip_outputs(first).next if turns else start_of_unit(step, first)):
        buffer = insert_call(
            graph, ops.empty_gradients, (bucket.index, bucket.numel), Origin(bucket.name, Phase.BACKWARD),
            {"dtype": bucket.reduce_dtype, "device": torch.device(step.device.type)},
            name=name, fake=step.fake((bucket.numel,), bucket.reduce_dtype),
        )  # fmt: skip
    if turns:
        tails.add(first, buffer)
    copies = [(_aten.copy_.default, *member) for member in members[0]]
    sums = [(_aten.add_.Tensor, *member) for later in members[1:] for member in later]
    for write, gradient, slot in (*copies, *sums):
        where = Origin(origin(gradient).layer, Phase.BACKWARD)
        with graph.inserting_after(
            max(tails.skip_outputs(gradient), buffer)
        ):  # nodes compare by their place in the graph
            place = (buffer, list(slot.shape), list(slot.stride), slot.offset)
            fake = step.fake_view(buffer, slot.shape, slot.stride, slot.offset)
            view = insert_call(graph, _aten.as_strided.default, place, where, fake=fake)
        with graph.inserting_after(view):
            written = insert_call(graph, write, (view, gradient), where)
        tails.add(gradient, written)
    return buffer


def _turns_in_unit(step: StepGraph, bucket: Bucket, first: fx.Node) -> bool:
    """True if forward turns into backward inside the unit of a bucket, with nothing between it and the first gradient.

    The buffer is then made when there is a gradient to write, so that the run around the loss is not cut. A slice of a
    weight cuts it in any case.
    """
    if bucket.is_slice:
        return False
    before = start_of_unit(step, first).prev
    if before.op != "call_function" or before.target in ops.EVENTS:
        return False
    unit = bucket.unit if bucket.unit in step.units else ""
    return origin(before).phase is Phase.FORWARD and step.unit_of(before) == step.unit_of(first) == unit


def _put_off(step: StepGraph, gradient: fx.Node, others: list[fx.Node], buffer_bytes: int) -> None:
    """Compute a weight's gradient later, when more has died where its buffer is made.

    After what else reads the same values, they die with it. Where the rest of the run holds little and leaves next to
    nothing, it goes to the run's end, after the releases there: a gathered weight is then not there next to its
    gradient. ``others`` are the bucket's other gradients, which need the buffer as well.
    """
    order = step.positions()
    if gradient.target is operator.getitem or is_random(gradient):
        return
    read = dict.fromkeys(map(storage_source, gradient.all_input_nodes))
    inputs = [storage for storage in read if origin(storage[0]).phase is Phase.BACKWARD]
    readers = [r for s in inputs for r in consumers(s[0]) if any(storage_source(n) == s for n in r.all_input_nodes)]
    last = max(readers, key=order.__getitem__, default=gradient)
    end = end_of_unit(step, gradient)
    rest = [node for node in order if order[last] < order[node] <= order[end] and node is not gradient]
    while end.next.target is ops.release and storage_source(end.next.all_input_nodes[0]) not in read:
        end = end.next
    most, left = _peak_and_rest(rest)
    if all(order[user] > order[end] for user in gradient.users) and (
        not is_view(gradient) and most <= _LITTLE * buffer_bytes and left <= _NEXT_TO_NOTHING * buffer_bytes
    ):
        end.append(gradient)
    elif order[last] > order[gradient] and all(order[node] > order[last] for node in (*gradient.users, *others)):
        skip_getitems(last).append(gradient)


def _peak_and_rest(nodes: list[fx.Node]) -> tuple[int, int]:
    """Peak bytes of a run of nodes' results, and those of them that are read after the run."""
    position = {node: number for number, node in enumerate(nodes)}
    dying: Counter[int] = Counter()
    live = most = 0
    for number, node in enumerate(nodes):
        allocated, readers = _output_bytes(node), consumers(node)
        live += allocated
        most = max(most, live)
        if all(reader in position for reader in readers):
            dying[max((position[reader] for reader in readers), default=number)] += allocated
        live -= dying[number]
    return most, live


def _output_bytes(node: fx.Node) -> int:
    """Bytes of the values that a node makes."""
    if is_view(node) or aliased_input(node) is not None:
        return 0
    return sum(map(storage_size, outputs_of(node)))


def _issue(step: StepGraph, plan: Plan, bucket: Bucket, buffer: fx.Node, body: int | None) -> fx.Node:
    """Start a reduction: of the body's gradients, or of all there are for None."""
    last_write = max(consumers(buffer))
    place = end_of_unit(step, last_write)
    while place.next.target is ops.release:
        place = place.next
    size, dtype = (bucket.numel // bucket.num_reduced,), bucket.reduce_dtype
    # Which slice is a rank's own is known where it runs: the first stands for it.
    in_buffer = not bucket.is_cut(plan.stage)
    first = divisors(bucket.reduce_dtype, bucket.mesh.num_samples(bucket.reduction_axes))[0]
    if first != 1:
        with step.graph.inserting_after(place):
            place = insert_call(step.graph, _aten.div_.Tensor, (buffer, first), Origin(bucket.name, Phase.BACKWARD))
    with step.graph.inserting_after(place):
        started = insert_call(
            step.graph, ops.reduce_scatter_into if in_buffer else ops.reduce_scatter,
            (buffer, bucket.index, bucket.num_reduced),
            Origin(bucket.name, Phase.BACKWARD), dict(axes_argument(bucket.reduction_axes)),
            name=_name(f"reduce_{bucket.index}", body or 0),
            fake=step.fake_view(buffer, size, (1,), 0) if in_buffer else step.fake(size, dtype),
        )  # fmt: skip
    return started if body is not None else set_task(started, Task(Job.REDUCTION, bucket.index))


def _add(
    step: StepGraph,
    bucket: Bucket,
    partial: fx.Node | None,
    buffer: fx.Node,
    started: fx.Node,
    anchor: fx.Node,
    plan: Plan,
    body: int,
) -> fx.Node:
    """Await a body's reduction after ``anchor``, and add it to the ``partial`` sum of this rank's slices, if any."""
    where = Origin(bucket.name, Phase.BACKWARD)
    with step.graph.inserting_before(skip_releases(max(anchor, started)).next):
        grad = _average(step, bucket, buffer, started, where, body)
        if partial is not None:
            insert_call(step.graph, _aten.add_.Tensor, (partial, grad), where)
            return partial
        dtype = _sum_dtype(bucket, plan)
        if dtype == bucket.reduce_dtype:
            return grad
        return insert_call(
            step.graph, _aten._to_copy.default, (grad,), where, {"dtype": dtype}, name=f"sum_{bucket.index}"
        )


def _sum_dtype(bucket: Bucket, plan: Plan) -> torch.dtype:
    """The dtype in which slices are added up: that of the update, which a delayed one gets from what it is handed."""
    delayed = any(decision.delayed for decision in bucket_decisions(plan.states, bucket.index))
    return bucket.reduce_dtype if delayed else bucket.dtype


def _finish(
    step: StepGraph,
    plan: Plan,
    bucket: Bucket,
    buffer: fx.Node,
    started: fx.Node,
    anchor: fx.Node,
    partial: fx.Node | None,
) -> fx.Node:
    """Await the last reduction, and add it to the ``partial`` sum of the earlier ones, if any.

    Returns the result, or where all ranks update with all of it the started gather of the sum.
    """
    where = Origin(bucket.name, Phase.UPDATE)
    with step.graph.inserting_before(skip_releases(max(anchor, started)).next):
        grad = set_task(_average(step, bucket, buffer, started, where), Task(Job.GRADIENT, bucket.index))
        if not bucket.is_cut(plan.stage):
            args, how = (buffer, grad, bucket.index), dict(axes_argument(bucket.reduction_axes))
            return insert_call(step.graph, ops.all_gather_into, args, where, how, name=f"gather_grad_{bucket.index}")
        return grad if partial is None else insert_call(step.graph, _aten.add_.Tensor, (partial, grad), where)


def _average(
    step: StepGraph, bucket: Bucket, buffer: fx.Node, started: fx.Node, where: Origin, body: int = 0
) -> fx.Node:
    """This rank's slice of the average over the ranks, awaited at the insertion point."""
    grad = insert_call(step.graph, ops.wait, (started, buffer), where, name=_name(f"grad_{bucket.index}", body))
    rest = divisors(bucket.reduce_dtype, bucket.mesh.num_samples(bucket.reduction_axes))[1]
    if rest != 1:
        insert_call(step.graph, _aten.div_.Tensor, (grad, rest), where)
    return grad


def _await_sums(step: StepGraph, plan: Plan, layout: BucketLayout, place: Callable[[str | None], fx.Node]) -> None:
    """Await what is gathered of sums that all ranks update with; ``place`` gives the node that a decision's comes
    after."""
    gathers = {
        decision.wait_after: step.reduced[decision.bucket]
        for decision in plan.reduces
        if step.reduced[decision.bucket].target is ops.all_gather_into
    }
    awaited: list[fx.Node] = []
    for decision in plan.reduces:
        if step.reduced[decision.bucket].target is not ops.all_gather_into:
            continue
        gather = step.reduced[decision.bucket]
        # What is gathered starts before anything gathered earlier is awaited. Nodes compare by their place.
        earlier = [gather, *awaited[-1:]]
        if decision.gathered_after in gathers:
            earlier.append(gathers[decision.gathered_after])
        elif decision.gathered_after != "":
            earlier.append(place(decision.gathered_after))
        bucket = layout.buckets[decision.bucket]
        with step.graph.inserting_after(skip_releases(max(earlier))):
            where = Origin(bucket.name, Phase.UPDATE)
            awaited.append(insert_call(step.graph, ops.wait, (gather,), where, name=f"full_grad_{bucket.index}"))
        step.reduced[bucket.index] = awaited[-1]
