"""The errors and warnings that zerofx raises.

Each message states what was expected, what was found, and what to do. An error is raised before anything of the
user's is changed, and it is the same on every rank.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

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


class NonFiniteLossError(ZeroFXError, ArithmeticError):
    """The loss of a step is NaN or infinite, and ``on_nonfinite="raise"``: nothing has been updated."""


class NonFiniteGradientsError(ZeroFXError, ArithmeticError):
    """A gradient of a scaled loss is NaN or infinite: how a step that is left out ends. Steps do not raise it."""


class RowOverflowError(ZeroFXError, RuntimeError):
    """Rows of experts have found no room on their ranks: how a step ends that is run again. Steps do not raise it.

    ``shares``: the most rows that a rank has had for another, of this rank's, in equal shares.
    """

    def __init__(self, shares: float) -> None:
        super().__init__(f"rows of experts have found no room: {shares:g} equal shares of them are for one rank")
        self.shares = shares


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


class CheckpointError(ZeroFXError, RuntimeError):
    """A checkpoint cannot be written or read, is damaged, or is one of another model or optimizer."""


class InternalError(ZeroFXError, RuntimeError):
    """A defect of zerofx itself: an error that it did not mean to raise, which is the cause of this one."""


# What Python raises where code is wrong; what torch, the system or a user's own code raises stays as it is.
_DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError, TypeError)


@contextlib.contextmanager
def wrap_defects(work: str, remedy: str = "", *, only_own: bool = True) -> Iterator[None]:
    """While open, defects of zerofx become an ``InternalError`` that says what was being done, and what helps.

    Args:
        work: completes "expected to ...".
        remedy: how to do without, if there is a way.
        only_own: whether code runs inside that is not zerofx's: errors that begin there stay as they are.
    """
    try:
        yield
    except ZeroFXError:
        raise
    except Exception as error:
        if only_own and not (isinstance(error, _DEFECTS) and _begins_here(error)):
            raise
        internal = InternalError(
            f"expected to {work}, found a defect of zerofx: {type(error).__name__}: {error}. "
            f"{remedy + ', and please' if remedy else 'Please'} report it with this traceback, what `zerofx doctor` "
            f"prints, what ZEROFX_DEBUG=5 prints, and the step's folder in ZEROFX_DUMP_DIR"
        )
        for note in getattr(error, "__notes__", ()):
            internal.add_note(note)
        raise internal from error


def _begins_here(error: BaseException) -> bool:
    """True if a line of zerofx raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES[0])


def summarise_error(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class ZeroFXWarning(UserWarning):
    """Base of all warnings of zerofx."""


class ResultWarning(ZeroFXWarning):
    """The result may differ from what is meant, for example a value that is not finite or not followed."""


class ZeroFXNotice(ZeroFXWarning):
    """The result is what is asked for, but not as fast, or not as is asked: a shape captured again, an option without
    effect."""


def notify(message: str) -> None:
    """Warn with a ``ZeroFXNotice``, as ``warn``."""
    warn(message, ZeroFXNotice)


def warn(message: str, category: type[ZeroFXWarning] = ResultWarning) -> None:
    """Warn with a ``ResultWarning`` that points at the line of the user's that called zerofx."""
    import inspect  # which takes as long as the rest of zerofx's face

    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
