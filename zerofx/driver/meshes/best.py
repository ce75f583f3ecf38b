"""Choose the mesh of a step that is being built with ``mesh="auto"``: on rank 0, the same on all."""

from __future__ import annotations

import sys

from zerofx.driver.captures import Captures
from zerofx.driver.meshes.choice import choose_mesh
from zerofx.driver.plan_only import CapturedStep, plan_captured
from zerofx.driver.prepared import Request
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.mesh import Mesh


def best_mesh(request: Request, control: Control) -> Mesh:
    """The mesh of all ranks on which the step of ``request``, which has no mesh yet, is fastest. Collective.

    With ``ZEROFX_DEBUG=1`` rank 0 writes the meshes that were compared.

    Raises:
        MemoryBudgetError: no mesh has a plan that fits.
        ZeroFXError: the step cannot be captured, or run on any mesh.
    """
    return control.share("choose a mesh", lambda: _choose(request, control.num_ranks))


def _choose(request: Request, num_ranks: int) -> Mesh:
    captures = Captures(request.model, request.batch, request.options, request.settings)
    captured = CapturedStep(request, captures)
    _, comparison = choose_mesh(
        request, captures, num_ranks, lambda mesh: plan_captured(captured, mesh, verbose=False),
        on_cpu=is_on_cpu(captures.first.device),
    )  # fmt: skip
    if request.settings.debug:
        sys.stderr.write(f"{comparison}\n")
    return comparison.best.mesh
