"""zerofx: one planned training step for models that do not fit."""

from zerofx.api import compile
from zerofx.errors import (
    CaptureError,
    CompilerError,
    InvalidGraphError,
    OptimizerError,
    PlanError,
    RankMismatchError,
    ShardedParametersError,
    UsageError,
    ZeroFXError,
    ZeroFXWarning,
)
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.plan import Plan
from zerofx.step import Step

__all__ = [
    "CaptureError",
    "CompilerError",
    "InvalidGraphError",
    "Machine",
    "OptimizerError",
    "Plan",
    "PlanError",
    "RankMismatchError",
    "ShardedParametersError",
    "Step",
    "UsageError",
    "ZeroFXError",
    "ZeroFXWarning",
    "compile",
]
