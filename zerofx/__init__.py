"""zerofx: one planned training step for models that do not fit."""

from zerofx.api import compile
from zerofx.deferred import empty_init
from zerofx.errors import (
    CaptureError,
    CompilerError,
    InvalidGraphError,
    MemoryBudgetError,
    OptimizerError,
    PlanError,
    RankMismatchError,
    ShardedParametersError,
    UsageError,
    ZeroFXError,
    ZeroFXWarning,
)
from zerofx.planning import PlannedStep, plan
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.measured import MeasuredCosts
from zerofx.scheduler.plan import Plan
from zerofx.search import SearchResult, largest_micro_batch, smallest_world
from zerofx.step import Step
from zerofx.tune_result import Candidate, TuneResult
from zerofx.tuning import tune

__all__ = [
    "Candidate",
    "CaptureError",
    "CompilerError",
    "InvalidGraphError",
    "Machine",
    "MeasuredCosts",
    "MemoryBudgetError",
    "OptimizerError",
    "Plan",
    "PlanError",
    "PlannedStep",
    "RankMismatchError",
    "SearchResult",
    "ShardedParametersError",
    "Step",
    "TuneResult",
    "UsageError",
    "ZeroFXError",
    "ZeroFXWarning",
    "compile",
    "empty_init",
    "largest_micro_batch",
    "plan",
    "smallest_world",
    "tune",
]
