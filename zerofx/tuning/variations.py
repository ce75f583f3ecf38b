"""The variations that ``zerofx.tune`` tries: plans with other options, each with a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerofx.options import CompileOptions
from zerofx.scheduler.plan.mesh import Mesh

_PREFETCHES = (0, 2, 4)  # units to gather ahead, besides what was asked for


@dataclass(frozen=True)
class Variation:
    """Options with one strategy. ``searched``: whether the plan is searched within the memory budget; one that is not
    follows the options, and is not run if it does not fit."""

    name: str
    options: CompileOptions
    searched: bool = True


def variations(options: CompileOptions, mesh: Mesh) -> tuple[Variation, ...]:
    """All variations of the requested options, those first. Several may lead to one plan."""
    gathers = options.stage == 3 and mesh.num_ranks > mesh.replicate
    return (
        Variation("as asked", options),
        *_vary_recompute(options),
        *_vary_offload(options),
        *(_vary_gathers(options) if gathers else ()),
    )


def _vary_recompute(options: CompileOptions) -> Iterator[Variation]:
    if options.recompute == "auto":
        yield Variation("recompute nothing", replace(options, recompute="none"))
    if options.recompute != "none":
        yield Variation("recompute all", replace(options, recompute="full"), searched=False)


def _vary_offload(options: CompileOptions) -> Iterator[Variation]:
    if options.offload not in ("auto", "none"):
        yield Variation("offload nothing", replace(options, offload="none"))


def _vary_gathers(options: CompileOptions) -> Iterator[Variation]:
    for ahead in _PREFETCHES:
        if ahead != options.prefetch:
            yield Variation(f"prefetch {ahead}", replace(options, prefetch=ahead))
    if options.keep_gathered != "all":
        yield Variation("keep all gathered", replace(options, keep_gathered="all"))
    if options.keep_gathered:
        yield Variation("keep none gathered", replace(options, keep_gathered=()))
