"""The variations that ``zerofx.tune`` tries: plans with other options, each with a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerofx.options import CompileOptions
from zerofx.scheduler.plan.mesh import Mesh

_PREFETCHES = (0, 2, 4)  # units to gather ahead, besides what was asked for


@dataclass(frozen=True)
class Variation:
    """Options that lean one way. ``searched``: whether the plan is sought within the memory budget; one that is not is
    as the options say, and is not run where it does not fit."""

    name: str
    options: CompileOptions
    searched: bool = True


def variations(options: CompileOptions, mesh: Mesh) -> tuple[Variation, ...]:
    """All variations for what was asked, that first. Several may lead to one plan."""
    gathers = options.stage == 3 and mesh.num_ranks > mesh.replicate
    return (
        Variation("as asked", options),
        *_recomputing(options),
        *_offloading(options),
        *(_gathering(options) if gathers else ()),
    )


def _recomputing(options: CompileOptions) -> Iterator[Variation]:
    if options.recompute == "auto":
        yield Variation("recompute nothing", replace(options, recompute="none"))
    if options.recompute != "none":
        yield Variation("recompute all", replace(options, recompute="full"), searched=False)


def _offloading(options: CompileOptions) -> Iterator[Variation]:
    if options.offload not in ("auto", "none"):
        yield Variation("offload nothing", replace(options, offload="none"))


def _gathering(options: CompileOptions) -> Iterator[Variation]:
    for ahead in _PREFETCHES:
        if ahead != options.prefetch:
            yield Variation(f"prefetch {ahead}", replace(options, prefetch=ahead))
    if options.keep_gathered != "all":
        yield Variation("keep all gathered", replace(options, keep_gathered="all"))
    if options.keep_gathered:
        yield Variation("keep none gathered", replace(options, keep_gathered=()))
