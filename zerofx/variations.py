"""What ``zerofx.tune`` tries: plans that lean one way or another, each a name and options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofx.options import CompileOptions

_PREFETCHES = (0, 2, 4)  # units to gather ahead, beside what was asked for


@dataclass(frozen=True)
class Variation:
    """Options that lean one way. ``searched``: whether the plan is sought within the memory budget; one that is not is
    as the options say, and is not run where it does not fit."""

    name: str
    options: CompileOptions
    searched: bool = True


def variations(options: CompileOptions, num_ranks: int) -> tuple[Variation, ...]:
    """All variations for what was asked, that first. Several may lead to one plan. A leaning is a line here."""
    policy = options.policy
    found = [Variation("as asked", options)]
    if options.recompute == "auto":
        found.append(Variation("recompute nothing", replace(options, recompute="none")))
    if options.recompute != "none":
        found.append(Variation("recompute all", replace(options, recompute="full"), searched=False))
    if options.stage == 3 and num_ranks > 1:
        for ahead in _PREFETCHES:
            if ahead != policy.prefetch:
                found.append(Variation(f"prefetch {ahead}", replace(options, policy=replace(policy, prefetch=ahead))))
        if policy.keep != "all":
            found.append(Variation("keep all gathered", replace(options, policy=replace(policy, keep="all"))))
        if policy.keep:
            found.append(Variation("keep none gathered", replace(options, policy=replace(policy, keep=()))))
    return tuple(found)
