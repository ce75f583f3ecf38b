"""zerofx: one planned training step for models that do not fit.

Names are imported when they are first asked for: the command line needs no torch to list machines, and a program that
imports zerofx waits for what it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zerofx.errors import (
    CaptureError,
    CheckpointError,
    CompilerError,
    InternalError,
    InvalidGraphError,
    MemoryBudgetError,
    NonFiniteLossError,
    OptimizerError,
    PlanError,
    RankMismatchError,
    ResultWarning,
    ShardedParametersError,
    TierError,
    UsageError,
    ZeroFXError,
    ZeroFXNotice,
    ZeroFXWarning,
)

if TYPE_CHECKING:
    from zerofx.api import compile
    from zerofx.averages import EMA, SWA
    from zerofx.deferred import empty_init
    from zerofx.driver.plan_only import PlannedStep, plan
    from zerofx.ladder import fitted_lengths
    from zerofx.precision import LossScale, Precision
    from zerofx.scheduler.cost.machine import Machine
    from zerofx.scheduler.cost.measured import MeasuredCosts
    from zerofx.scheduler.plan.mesh import Mesh
    from zerofx.scheduler.plan.plan import Plan
    from zerofx.session.run import Run
    from zerofx.session.step import Step
    from zerofx.tuning.capacity import SearchResult, largest_micro_batch, smallest_world
    from zerofx.tuning.result import Candidate, TuneResult
    from zerofx.tuning.tuner import tune

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "SWA",
    "Candidate",
    "CaptureError",
    "CheckpointError",
    "CompilerError",
    "InternalError",
    "InvalidGraphError",
    "LossScale",
    "Machine",
    "MeasuredCosts",
    "MemoryBudgetError",
    "Mesh",
    "NonFiniteLossError",
    "OptimizerError",
    "Plan",
    "PlanError",
    "PlannedStep",
    "Precision",
    "RankMismatchError",
    "ResultWarning",
    "Run",
    "SearchResult",
    "ShardedParametersError",
    "Step",
    "TierError",
    "TuneResult",
    "UsageError",
    "ZeroFXError",
    "ZeroFXNotice",
    "ZeroFXWarning",
    "__version__",
    "compile",
    "empty_init",
    "fitted_lengths",
    "largest_micro_batch",
    "plan",
    "smallest_world",
    "tune",
]

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others
    _HOMES = {
        "Candidate": "zerofx.tuning.result",
        "EMA": "zerofx.averages",
        "LossScale": "zerofx.precision",
        "Machine": "zerofx.scheduler.cost.machine",
        "MeasuredCosts": "zerofx.scheduler.cost.measured",
        "Mesh": "zerofx.scheduler.plan.mesh",
        "Plan": "zerofx.scheduler.plan.plan",
        "PlannedStep": "zerofx.driver.plan_only",
        "Precision": "zerofx.precision",
        "SearchResult": "zerofx.tuning.capacity",
        "Run": "zerofx.session.run",
        "SWA": "zerofx.averages",
        "Step": "zerofx.session.step",
        "TuneResult": "zerofx.tuning.result",
        "compile": "zerofx.api",
        "empty_init": "zerofx.deferred",
        "fitted_lengths": "zerofx.ladder",
        "largest_micro_batch": "zerofx.tuning.capacity",
        "plan": "zerofx.driver.plan_only",
        "smallest_world": "zerofx.tuning.capacity",
        "tune": "zerofx.tuning.tuner",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'zerofx' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_HOMES})
