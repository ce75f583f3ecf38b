"""Updates that need whole parameters: the optimizer's own step at the ranks that own them."""

from zerofx.optimizers.whole.optimizer import WholeOptimizer
from zerofx.optimizers.whole.owned import (
    OwnedSizes,
    OwnedStates,
    cast_views,
    names_of,
    owners_of,
    planned_sizes,
    state_views,
    whole_of,
)
from zerofx.optimizers.whole.step import Updated, WholeStep

__all__ = [
    "OwnedSizes",
    "OwnedStates",
    "Updated",
    "WholeOptimizer",
    "WholeStep",
    "cast_views",
    "names_of",
    "owners_of",
    "planned_sizes",
    "state_views",
    "whole_of",
]
