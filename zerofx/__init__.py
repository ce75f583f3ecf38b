"""zerofx: one planned training step for models that do not fit.

Names are imported when they are first asked for: the command line needs no torch to list machines, and a program that
imports zerofx waits for what it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zerofx.errors import (
    CaptureError,
    CompilerError,
    InternalError,
    InvalidGraphError,
    MemoryBudgetError,
    NonFiniteLossError,
    OptimizerError,
    PlanError,
    RankMismatchError,
    ShardedParametersError,
    UsageError,
    ZeroFXError,
    ZeroFXWarning,
)

if TYPE_CHECKING:
    from zerofx.api import compile
    from zerofx.deferred import empty_init
    from zerofx.planning import PlannedStep, plan
    from zerofx.scheduler.machine import Machine
    from zerofx.scheduler.measured import MeasuredCosts
    from zerofx.scheduler.plan import Plan
    from zerofx.search import SearchResult, largest_micro_batch, smallest_world
    from zerofx.step import Step
    from zerofx.tune_result import Candidate, TuneResult
    from zerofx.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "CaptureError",
    "CompilerError",
    "InternalError",
    "InvalidGraphError",
    "Machine",
    "MeasuredCosts",
    "MemoryBudgetError",
    "NonFiniteLossError",
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
    "__version__",
    "compile",
    "empty_init",
    "largest_micro_batch",
    "plan",
    "smallest_world",
    "tune",
]

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others
    _HOMES = {
        "Candidate": "zerofx.tune_result",
        "Machine": "zerofx.scheduler.machine",
        "MeasuredCosts": "zerofx.scheduler.measured",
        "Plan": "zerofx.scheduler.plan",
        "PlannedStep": "zerofx.planning",
        "SearchResult": "zerofx.search",
        "Step": "zerofx.step",
        "TuneResult": "zerofx.tune_result",
        "compile": "zerofx.api",
        "empty_init": "zerofx.deferred",
        "largest_micro_batch": "zerofx.search",
        "plan": "zerofx.planning",
        "smallest_world": "zerofx.search",
        "tune": "zerofx.tuning",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'zerofx' has no attribute {name!r}")
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found

    def __dir__():
        return sorted({*globals(), *_HOMES})
