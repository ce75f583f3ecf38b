"""Check that the norm of all gradients counts each of them once, on whatever axes ranks have copies of it.

    reduce = reduce_scatter(grads, ..., over="shard,model"); grad = wait(reduce); squares = square_sum(grad)

What a rank takes squares of is to be what no other rank has: the gradient has been cut along every axis of the mesh on
which ranks have the parameter, and no other. A bucket of parameters in parts is another on each rank of the model axis.
"""

from __future__ import annotations

from typing import NoReturn

from torch import fx

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_of
from zerofx.ir.text import node_text
from zerofx.scheduler.plan.mesh import MODEL, Axis

_GATHERS = frozenset({ops.all_gather, ops.all_gather_into})


def check_norm(step: StepGraph, layout: BucketLayout) -> None:
    """Check the squares that a step takes of its gradients.

    Raises:
        InvalidGraphError: some are counted on several ranks, or left out.
    """
    for squares in [node for node in step.calls() if node.target is ops.square_sum]:
        way = list(_way(squares))
        bucket = _bucket(way, layout)
        if bucket is None:
            continue
        cut: set[Axis] = set()
        for node in reversed(way):  # from the buffer on
            axes = set(layout.mesh.axes_in_use(axes_of(node, layout.mesh)))
            if node.target in ops.REDUCTIONS or node.target is ops.exchange:
                cut |= axes
            elif node.target in _GATHERS:
                cut -= axes
        # Those on which ranks have the bucket's parameters, and so the sum of their gradients.
        asked = set(layout.mesh.axes_in_use(layout.mesh.stage_axes)) - (set(MODEL) if bucket.has_model_parts else set())
        if cut != asked:
            _fail(squares, cut, asked)


def _way(squares: fx.Node) -> list[fx.Node]:
    """From what squares are taken of back to the buffer of gradients: each node reads the next one first."""
    way: list[fx.Node] = []
    node: object = squares.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        way.append(node)
        node = node.args[1] if node.target is ops.all_gather_into else node.args[0] if node.args else None
    return way


def _bucket(way: list[fx.Node], layout: BucketLayout) -> Bucket | None:
    """The bucket whose gradients begin there."""
    buffer = way[-1]
    index = buffer.args[0] if buffer.target is ops.empty_gradients else None
    return layout.buckets[index] if isinstance(index, int) else None


def _fail(squares: fx.Node, cut: set[Axis], asked: set[Axis]) -> NoReturn:
    raise InvalidGraphError(
        f"norm: {squares.name} takes squares of gradients that are cut along {', '.join(sorted(cut)) or 'no axis'}, "
        f"where ranks along {', '.join(sorted(asked)) or 'no axis'} have them: some count several times, or not\n"
        f"> {node_text(squares)}"
    )
