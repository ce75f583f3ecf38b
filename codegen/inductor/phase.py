"""The rewrites of a traced region, in order; what runs inside Inductor, on its kernels, is ``kernel_passes.py``'s."""

from __future__ import annotations

from zerofx.codegen.cpu.rewrites import TakeProducts
from zerofx.codegen.inductor.hoist_views import HoistViews
from zerofx.codegen.inductor.keep_copies import KeepCopies
from zerofx.codegen.inductor.planned_strides import PlannedStrides
from zerofx.codegen.inductor.traced import RegionRewrite

REGION_REWRITES: tuple[RegionRewrite, ...] = (
    PlannedStrides(),  # operators taken apart, values in the strides that were planned
    TakeProducts(),  # on a CPU, products by other means than ATen's where that is faster
    KeepCopies(),  # copies of what is written into
    HoistViews(),  # views of inputs become inputs
)
