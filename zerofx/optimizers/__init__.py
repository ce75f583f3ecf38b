"""Optimizer updates on flat shards: any elementwise ``torch.optim`` optimizer as a graph, and its numbers by step."""

from zerofx.optimizers.outside import same
from zerofx.optimizers.program import StateSpec, UpdateProgram, run_graph
from zerofx.optimizers.several import Optimizers
from zerofx.optimizers.shadow import copy_optimizer
from zerofx.optimizers.shadow_optimizer import (
    ShadowOptimizer,
    check_elementwise,
    check_supported,
    flat_state_dtypes,
    initial_scalars,
    scalar_state_names,
)
from zerofx.optimizers.stand_in import StandIn
from zerofx.optimizers.support import has_fused

__all__ = [
    "Optimizers",
    "ShadowOptimizer",
    "StandIn",
    "StateSpec",
    "UpdateProgram",
    "check_elementwise",
    "check_supported",
    "copy_optimizer",
    "flat_state_dtypes",
    "has_fused",
    "initial_scalars",
    "run_graph",
    "same",
    "scalar_state_names",
]
