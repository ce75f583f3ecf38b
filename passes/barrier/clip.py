"""Clip the gradients of a step by the norm of all of them, as ``torch.nn.utils.clip_grad_norm_`` does.

    grad_0 = wait(reduce_0, grads_0)        grad_0 = wait(reduce_0, grads_0)
    div_(grad_0, 2)                         div_(grad_0, 2)
                                            squares_0 = square_sum(grad_0)            # of this rank's slice
    ...                                     ...
                                            squares = sum(cat([squares_0, squares_1]))
                                            parts = wait(all_gather(squares, -1, 2))  # a number from each rank
                                            grad_norm = sqrt(sum(parts))
                                            clip = clamp(max_norm / (grad_norm + 1e-6), max=1)
    return loss                             return loss, grad_norm

The update pass multiplies each bucket's gradient by ``clip``. So every update comes after every reduction, and reduced
gradients live until then.

Where the norms of layers are asked for, the squares of each bucket are summed over all ranks and handed out, whether
gradients are clipped or not: no update waits for that.

    parts = wait(all_gather(cat([squares_0, squares_1]), -1, 2))
    return loss, grad_norm, sum(view(parts, [2, 2]), [0])

Where the loss is scaled so is the sum, and the norm is multiplied by the scale's inverse (``unscale.py``).

The sum is taken over slices of buckets, in the order of buckets and then of ranks. At stage 0 too, where each rank has
all gradients: a slice's sum is taken before slices are gathered again. So the norm has the same bits at every stage and
with every plan for as many ranks, and gradients are read once by somebody.

Of a step in stages each has its own buckets: the squares of all of them are put together first, in the order of stages,
which is that of the buckets on one rank.

    all = wait(all_reduce_values(cat([zeros, squares]), "sum", 2, over="pipe"))

Does not handle: clipping of delayed updates, which are refused together with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, tensor
from zerofx.ir.graph import Clipping, PipeStage, StepGraph
from zerofx.ir.op_kernels.norms import norm_dtype
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.reduced_gradients import gather_number, numbers_of_slices
from zerofx.scheduler.plan.mesh import PIPE
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
_SMALLEST_NORM = 1e-6  # what clip_grad_norm_ adds to the norm before it divides by it
_WHERE = Origin("", Phase.UPDATE)


@dataclass(frozen=True)
class Clip:
    """Compute the norm of all reduced gradients and the factor for them, and leave both in ``StepGraph.clipping``.

    Or the sums of squares of each bucket's, which ``StepGraph.layer_squares`` has.
    """

    layout: BucketLayout
    name: str = "clip"

    def run(self, step: StepGraph, plan: Plan) -> None:
        if plan.max_grad_norm is not None and any(decision.delayed for decision in plan.states):
            raise PlanError("expected no delayed updates together with max_grad_norm, found some: make the plan anew")
        squares = numbers_of_slices(step, plan, self.layout, ops.square_sum, "squares")
        if plan.max_grad_norm is not None:
            self._norm(step, plan, squares)
        if plan.grad_norms:
            self._output_squares(step, plan, squares)

    def _output_squares(self, step: StepGraph, plan: Plan, squares: list[fx.Node]) -> None:
        """Output the squares of each bucket's gradient on all ranks."""
        graph = step.graph
        with graph.inserting_before(step.output):
            together = insert_call(graph, _aten.cat.default, (squares,), _WHERE, name="squares_of_buckets")
            if step.pipe is not None:
                together = _gather_stages(step, step.pipe, together)
            parts = gather_number(step, together, plan.mesh, plan.mesh.stage_axes, "squares_of_buckets")
            parts = insert_call(graph, _aten.view.default, (parts, [plan.num_stage_ranks, -1]), _WHERE)
            total = insert_call(graph, _aten.sum.dim_IntList, (parts, [0]), _WHERE)
            if step.unscaling is not None:
                for _ in range(2):
                    total = insert_call(graph, _aten.mul.Tensor, (total, step.unscaling.inverse), _WHERE)
        step.layer_squares = total
        step.set_outputs(step.loss, step.mutations)

    def _norm(self, step: StepGraph, plan: Plan, squares: list[fx.Node]) -> None:
        """The norm of all gradients, and the factor for them, where the step ends."""
        graph, max_norm = step.graph, plan.max_grad_norm
        dtype = torch.float32
        for bucket in self.layout.buckets:
            dtype = torch.promote_types(dtype, norm_dtype(bucket.reduce_dtype)) if bucket.trainable else dtype
        with graph.inserting_before(step.output):
            together = squares_of_all = insert_call(graph, _aten.cat.default, (squares,), _WHERE, name="squares")
            if step.pipe is not None:
                squares_of_all = _gather_stages(step, step.pipe, together)
            total = insert_call(graph, _aten.sum.dim_IntList, (squares_of_all, [0], True), _WHERE)
            of_ranks = gather_number(step, total, plan.mesh, plan.mesh.stage_axes, "squares")
            total = insert_call(graph, _aten.sum.default, (of_ranks,), _WHERE)
            root = insert_call(graph, _aten.sqrt.default, (total,), _WHERE)
            if step.unscaling is not None:
                root = insert_call(graph, _aten.mul.Tensor, (root, step.unscaling.inverse), _WHERE)
            norm = insert_call(graph, _aten._to_copy.default, (root,), _WHERE, {"dtype": dtype}, name="grad_norm")
            # Operator by operator what clip_grad_norm_ does: max_norm / tensor is a reciprocal and a product.
            more = insert_call(graph, _aten.add.Tensor, (norm, _SMALLEST_NORM), _WHERE)
            inverse = insert_call(graph, _aten.reciprocal.default, (more,), _WHERE)
            ratio = insert_call(graph, _aten.mul.Tensor, (inverse, max_norm), _WHERE)
            factor = insert_call(graph, _aten.clamp.default, (ratio, None, 1.0), _WHERE, name="clip")
        step.clipping = Clipping(norm, factor, together)
        step.set_outputs(step.loss, step.mutations)


def _gather_stages(step: StepGraph, pipe: PipeStage, own: fx.Node) -> fx.Node:
    """The squares of all stages' buckets, in order: to each, the others add zeros."""
    graph, parts, begin = step.graph, list[fx.Node](), 0
    for is_own, run in itertools.groupby(range(pipe.num_buckets), pipe.buckets.__contains__):
        size = len([*run])
        if not is_own:
            like = step.fake((size,), tensor(own).dtype)
            parts.append(insert_call(graph, _aten.new_zeros.default, (own, [size]), _WHERE, fake=like))
        elif size == len(pipe.buckets):
            parts.append(own)
        else:
            parts.append(insert_call(graph, _aten.slice.Tensor, (own, 0, begin, begin + size), _WHERE))
            begin += size
    mine = insert_call(graph, _aten.cat.default, (parts,), _WHERE, name="squares_in_place")
    args = (mine, "sum", pipe.num_stages)
    pending = insert_call(graph, ops.all_reduce_values, args, _WHERE, dict(axes_argument(PIPE)))
    return insert_call(graph, ops.wait, (pending, mine), _WHERE, name="squares_of_stages")
