"""Refusals of what a step in stages does not do, before anything has changed."""

from __future__ import annotations

from zerofx.errors import UsageError
from zerofx.scheduler.plan.mesh import Mesh


def refuse_in_stages(mesh: Mesh, purpose: str, instead: str) -> None:
    """Refuse what no rank can do that has the parameters of one stage.

    Raises:
        UsageError: the mesh has an axis pipe; says what to do ``instead``.
    """
    if mesh.pipe > 1:
        raise UsageError(
            f"expected to {purpose} where each rank has all layers, found the mesh {mesh}, on whose axis 'pipe' ranks "
            f"have stages: {instead}"
        )
