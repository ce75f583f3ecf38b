"""Optimizer updates on flat shards: any elementwise ``torch.optim`` optimizer as a graph and a host function."""

from zerofx.optimizers.choice import check_supported, flat_state_dtypes, scalar_state_names
from zerofx.optimizers.outside import same
from zerofx.optimizers.program import HostFunction, ScalarStateSpec, StateSpec, UpdateProgram, run_program
from zerofx.optimizers.shadow import copy_optimizer
from zerofx.optimizers.support import has_fused
from zerofx.optimizers.update import trace_update

__all__ = [
    "HostFunction",
    "ScalarStateSpec",
    "StateSpec",
    "UpdateProgram",
    "check_supported",
    "copy_optimizer",
    "flat_state_dtypes",
    "has_fused",
    "run_program",
    "same",
    "scalar_state_names",
    "trace_update",
]
