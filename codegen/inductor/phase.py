"""The rewrites of a traced region, in order; what runs inside Inductor, on its kernels, is ``kernel_passes.py``'s."""

from __future__ import annotations

from zerofx.codegen.cpu.rewrites import TakeProducts
from zerofx.codegen.inductor.region_rewrites import HoistViews, KeepCopies, PlannedStrides, RegionRewrite

REGION_REWRITES: tuple[RegionRewrite, ...] = (
    PlannedStrides(),  # operators taken apart, values in the strides that were planned
    TakeProducts(),  # on a CPU, products by other means than ATen's where that is faster
    KeepCopies(),  # copies of what is written into
    HoistViews(),  # views of inputs become inputs
)
