"""The axes of the mesh that a collective runs over: an argument of its node, left out where it is ``shard`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from torch import fx

from zerofx.ir import ops
from zerofx.scheduler.plan.mesh import SHARD, Axes, Axis, Mesh

_SEPARATOR = ","


def axes_argument(axes: Axes) -> Mapping[str, str]:
    """The keyword argument with the axes of a collective's node."""
    return {} if axes == SHARD else {"over": axes_text(axes)}


def axes_text(axes: Axes) -> str:
    """Axes as a node has them: ``"replicate,shard"``."""
    return _SEPARATOR.join(axes)


def axes_named(text: str) -> Axes:
    """The axes in a text of ``axes_text``."""
    known: dict[str, Axis] = {axis: axis for axis in get_args(Axis)}
    return tuple(known[axis] for axis in text.split(_SEPARATOR))


def axes_of(node: fx.Node, mesh: Mesh) -> Axes:
    """The axes that a collective's node runs over: a broadcast over all."""
    if node.target in ops.OVER_AXES:
        return axes_named(str(node.kwargs.get("over", axes_text(SHARD))))
    return mesh.world
