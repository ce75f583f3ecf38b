"""Reduce gradients in few bits, first within nodes and then across them (qgZ of ZeRO++, 2306.10209).

    reduce_0 = reduce_scatter(grads_0)      |   small_0 = quantise(grads_0, parts=4)
    ...                                     |   reduce_0 = exchange(small_0, "all")
    grad_0 = wait(reduce_0, grads_0)        |   ...
                                            |   grad_0 = wait(reduce_0, small_0)
                                            |   reduced_0 = dequantise_sum(grad_0)

On several nodes of several ranks it is two hops. In the first, each rank gets from its node all slices of its own place
on any node, and adds them up; in the second, each slice's sums travel from node to node, once. A value is rounded
twice then, whatever the number of ranks, where a ring would round it at every rank.

    small_0 = quantise(grads_0, parts=ranks of a node, interleave=nodes)
    reduce_0 = exchange(small_0, "node")
    ...                                                             # where the plan says
    hop_0 = wait(reduce_0, small_0)
    node_sum_0 = dequantise_sum(hop_0)
    across_0 = quantise(node_sum_0, parts=nodes)
    reduce_across_0 = exchange(across_0, "across")
    ...
    grad_0 = wait(reduce_across_0, across_0)
    reduced_0 = dequantise_sum(grad_0)

On a mesh nodes are those that the ranks of the bucket's own reduction are on, and its hop across replicas is one more
exchange, rounded anew.

    cross_0 = reduce_scatter(grad_0, over='replicate')  |   small_cross_0 = quantise(grad_0, parts=replicas)
    ...                                                 |   cross_0 = exchange(small_cross_0, "all", over='replicate')
    part_grad_0 = wait(cross_0, grad_0)                 |   ...
                                                        |   part_grad_0 = wait(cross_0, small_cross_0)
                                                        |   crossed_0 = dequantise_sum(part_grad_0)

Runs after all other passes: everything stays where those have put it. The gradient buffer dies with its quantisation.

Does not handle: stage 0, whose reduced slices are gathered again, and for the same reason sums that all replicas have:
these cross exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import end_of_unit, insert_call, node_named, skip_getitems
from zerofx.ir.facts import origin, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.quantise import ENCODINGS
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.plan_check import is_reduction
from zerofx.passes.wire.gathers import check_block
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class QuantiseReductions:
    """Change the reductions of the buckets that the plan names."""

    layout: BucketLayout
    name: str = "quantise_reductions"

    def run(self, step: StepGraph, plan: Plan) -> None:
        started: dict[object, list[fx.Node]] = {}
        crossing: dict[object, fx.Node] = {}
        for node in step.calls():
            if node.target is ops.reduce_scatter:
                if is_reduction(node):
                    started.setdefault(node.args[1], []).append(node)
                else:
                    crossing[node.args[1]] = node
        by_name = step.nodes_by_name()
        for decision in plan.wires:
            if decision.reduce == "exact":
                continue
            bucket = self.layout.buckets[decision.bucket]
            check_block(plan, bucket)
            if decision.reduce not in ENCODINGS or bucket.index not in started or plan.stage == 0:
                raise PlanError(
                    f"expected reductions in {' or '.join(ENCODINGS)} of a bucket that is trained, at stages 1 to 3, "
                    f"found {decision.reduce!r} for {bucket.name} at stage {plan.stage}; make the plan anew"
                )
            hop = None if decision.hop_after is None else node_named(by_name, decision.hop_after)
            *earlier, last = started[bucket.index]
            for reduction in earlier:  # of micro-batches before the last, whose second hop begins where it is awaited
                _quantise(step, plan, bucket, reduction, decision.reduce, None)
            _quantise(step, plan, bucket, last, decision.reduce, hop)
            if bucket.index in crossing:
                _send_in_one_hop(step, crossing[bucket.index], decision.reduce, "cross", "crossed")


def is_two_hops(num_nodes: int, ranks_per_node: int | None) -> bool:
    """True if a quantised reduction goes within nodes first: there are several nodes, of several ranks."""
    return num_nodes > 1 and ranks_per_node is not None and ranks_per_node > 1


def _quantise(step: StepGraph, plan: Plan, bucket: Bucket, reduce: fx.Node, encoding: str, hop: fx.Node | None) -> None:
    """Change a reduction; ``hop`` is what the second of two hops begins after."""
    graph, index, where = step.graph, bucket.index, origin(reduce)
    (awaited,) = reduce.users
    num_nodes, local = plan.nodes_along(bucket.reduction_axes)
    if not is_two_hops(num_nodes, local):
        _send_in_one_hop(step, reduce, encoding, "grads", "reduced")
        return
    small = _send(step, reduce, local, "node", encoding, f"small_grads_{index}", num_nodes)
    anchor = _second_hop_anchor(step, reduce, hop) if hop is not None else awaited.prev
    with graph.inserting_before(anchor.next):
        received = insert_call(graph, ops.wait, (reduce, small), where, name=f"hop_{index}")
        summed = insert_call(
            graph, ops.dequantise_sum, (received, local, encoding, torch.float32), where, name=f"node_sum_{index}"
        )
        small = insert_call(graph, ops.quantise, (summed, num_nodes, encoding), where, name=f"across_{index}")
        args, how = (small, index, num_nodes, "across"), dict(axes_argument(bucket.reduction_axes))
        across = insert_call(graph, ops.exchange, args, where, how, name=f"reduce_across_{index}")
    _add_up(step, awaited, across, num_nodes, encoding, f"reduced_{index}")


def _send_in_one_hop(step: StepGraph, reduce: fx.Node, encoding: str, given: str, gives: str) -> None:
    """Let a reduction send each of its ranks its slice; ``given`` and ``gives`` name its operand and result."""
    (_, index, num_ranks), (awaited,) = reduce.args, reduce.users
    assert isinstance(num_ranks, int)
    _send(step, reduce, num_ranks, "all", encoding, f"small_{given}_{index}")
    _add_up(step, awaited, reduce, num_ranks, encoding, f"{gives}_{index}")


def _send(
    step: StepGraph, reduce: fx.Node, num_parts: int, group: str, encoding: str, name: str, interleave: int = 1
) -> fx.Node:
    """Make an exchange of a reduction, of what is returned."""
    buffer, index, _ = reduce.args
    args = (buffer, num_parts, encoding, interleave)
    with step.graph.inserting_before(reduce):
        small = insert_call(step.graph, ops.quantise, args, origin(reduce), name=name)
    reduce.target, reduce.args = ops.exchange, (small, index, num_parts, group)
    set_value(reduce, tensor(small))
    return small


def _add_up(step: StepGraph, awaited: fx.Node, sent: fx.Node, num_parts: int, encoding: str, name: str) -> None:
    """Await an exchange where the sum was awaited, and add up what has come."""
    numel, dtype, index = tensor(awaited).numel(), tensor(awaited).dtype, sent.args[1]
    assert isinstance(index, int)
    awaited.args = (sent, sent.args[0])
    set_value(awaited, tensor(sent))
    args = (awaited, num_parts, encoding, dtype)
    with step.graph.inserting_after(awaited):
        fake = step.fake((numel,), dtype)
        total = insert_call(step.graph, ops.dequantise_sum, args, origin(sent), name=name, fake=fake)
    awaited.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    if step.reduced.get(index) is awaited:
        step.reduced[index] = total


def _second_hop_anchor(step: StepGraph, reduce: fx.Node, hop: fx.Node) -> fx.Node:
    """The node after which the second hop begins: past the end of the unit's run with ``hop``, and the releases and
    starts there."""
    anchor = max(end_of_unit(step, skip_getitems(hop)), reduce)  # nodes compare by their place in the graph
    while anchor.next.target in (ops.release, ops.quantise, ops.reduce_scatter, ops.exchange):
        anchor = anchor.next
    return anchor
