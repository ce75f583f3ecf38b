"""Every error a user of zerofx can meet.

Each message states what was expected, what was found, and what to do. An error is raised before anything of the
user's is changed, and it is the same on every rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_OWN_FILES = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__)


class ZeroFXError(Exception):
    """Base of all errors that zerofx raises on purpose."""


class UsageError(ZeroFXError, ValueError):
    """An argument, or a combination of arguments, that zerofx cannot work with."""


class CaptureError(ZeroFXError, ValueError):
    """The model cannot be captured as one graph; the message names the source line to blame."""


class OptimizerError(ZeroFXError, ValueError):
    """The optimizer cannot be run on flat shards, or does not belong to the model."""


class RankMismatchError(ZeroFXError, RuntimeError):
    """Ranks disagree (graph, plan, batch shape, world size), or one of them did not turn up in time."""


class ShardedParametersError(ZeroFXError, RuntimeError):
    """The model was used while its parameters are sharded over the ranks."""


class CompilerError(ZeroFXError, RuntimeError):
    """A region could not be compiled, for example because the machine has no C++ compiler."""


class TierError(ZeroFXError, OSError):
    """A slower tier failed while a step ran: a file of the nvme tier could not be read or written."""


class InvalidGraphError(ZeroFXError, AssertionError):
    """A pass left a graph that breaks an invariant: a defect of zerofx, or of a pass that a user added."""


class MemoryBudgetError(ZeroFXError, ValueError):
    """No plan fits the memory budget; the message gives the least that one can, and what dominates there."""


class PlanError(ZeroFXError, ValueError):
    """A plan does not fit the graph, the machine or the world it is used with."""


class ZeroFXWarning(UserWarning):
    """Something a user should know: a shape captured anew, a loss that is not finite, an option without effect."""


def warn(message: str) -> None:
    """Warn with a ``ZeroFXWarning`` that points at the line of the user's that called zerofx."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ZeroFXWarning, stacklevel=level)
