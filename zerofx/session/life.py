"""The state that decides if a step may go on: closed, failed, showing whole parameters, in another world, or busy."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed

from zerofx.codegen.kernels.current_device import device_guard
from zerofx.errors import RankMismatchError, TierError, UsageError, warn, wrap_defects
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.held import allow_reads
from zerofx.runtime.state.state import process_group


class Life:
    """The life of one step on one rank. ``failure``: what ended it on this rank alone; empty if nothing."""

    def __init__(self, timeout_seconds: float) -> None:
        self.group = process_group()
        if self.group is None:
            _warn_if_alone()
        self.control = Control(self.group, timeout_seconds)
        self.closed = False
        self.showing = False  # the model has its whole parameters
        self.averaged = False  # parameters have the values of their averages
        self.looked_at = False  # it may be looked at as if it had
        self.failure = ""
        self.parameters: Iterable[torch.Tensor] = ()  # the model's, once a step has taken it over
        self._owned = threading.Lock()
        self._owner = (0, "")  # the thread that does something with the step, and what

    @property
    def failed(self) -> str:
        """The error that ended the step on this rank or another: ``step 3 failed on rank 1 ...``; empty for none."""
        return self.failure or self.control.lost

    @contextlib.contextmanager
    def claim(self, purpose: str, *, waits: bool = False) -> Iterator[None]:
        """While open, nothing else is done with the step, by other threads or by what interrupts this one.

        ``waits``: for what another thread is at, which takes no time while the model has its whole parameters.

        Raises:
            UsageError: something is being done with it; nothing has been changed.
        """
        if not self._owned.acquire(timeout=self.control.rank_timeout_seconds if waits else 0):
            thread, doing = self._owner
            here = thread == threading.get_ident()
            who = "a signal handler or callback has interrupted this thread, which" if here else "another thread"
            raise UsageError(
                f"expected to {purpose} while nothing else is done with the step, found that {who} is to {doing}: "
                f"call the step from one thread, one call after the other; what a signal asks for can be done once the "
                f"call has returned"
            )
        self._owner = (threading.get_ident(), purpose)
        try:
            yield
        finally:
            self._owned.release()

    @contextlib.contextmanager
    def turn(self, work: str, device: torch.device) -> Iterator[None]:
        """A block of ``work`` with the step, ``alone`` and on its device, whose own defects are said to be those of it.

        Raises:
            UsageError: as ``claim``.
        """
        # What is made in inference mode can be written neither by other threads nor by later steps outside of it.
        with self.claim(work), device_guard(device), wrap_defects(work), torch.inference_mode(False):
            yield

    @contextlib.contextmanager
    def end_on_error(self, what: str) -> Iterator[None]:
        """A block that changes what is in memory: where it fails on this rank, the step is over, since ``what``."""
        try:
            yield
        except BaseException as error:
            self.failure = f"{what} ({type(error).__name__}: {error})"
            raise

    def check_open(self, purpose: str, *, reads: bool = False) -> None:
        """Check that the step may ``purpose``. ``reads``: which only reads parameters, whatever values they have.

        Raises:
            UsageError: it is closed, or shows whole parameters, or averages in their place.
            RankMismatchError: the world is another, or a rank is lost.
            TierError: a part of what is trained has been lost with a tier.
        """
        if self.closed:
            raise UsageError(f"expected to {purpose} before close(), found the step closed: compile the model again")
        if self.showing:
            raise UsageError(f"expected to {purpose} outside full_parameters(), found it inside: leave the block first")
        if not reads:
            self.check_trained(purpose)
        self.check_world()
        if self.failure:
            raise TierError(
                f"expected to {purpose} with all states where they were put, found that {self.failure}: call "
                f"step.close(), build and compile the model again, and load a checkpoint"
            )

    def check_trained(self, purpose: str) -> None:
        """Check that parameters have the values that are trained.

        Raises:
            UsageError: they have those of their averages.
        """
        if self.averaged:
            raise UsageError(
                f"expected to {purpose} outside averaged_parameters(), found it inside, where parameters have other "
                f"values than those that are trained: leave the block first"
            )

    def check_world(self) -> None:
        """Check that the ranks are those that the model was compiled among.

        Raises:
            RankMismatchError: they are others, or one of them is lost.
        """
        group = process_group()
        now = torch.distributed.get_world_size(group) if group is not None else 1
        if now != self.control.num_ranks or (now > 1 and group is not self.group):
            world = f"{now}" if now != self.control.num_ranks else "another process group"
            raise RankMismatchError(
                f"expected the world of {self.control.num_ranks} rank(s) that the model was compiled in, found "
                f"{world}: save full_state_dict() and optimizer.state_dict() before the world changes, and build and "
                f"compile the model again after"
            )
        if self.control.lost:
            raise RankMismatchError(
                f"expected all ranks to be in the same place, found that {self.control.lost}: restart all "
                f"ranks from a checkpoint"
            )

    @contextlib.contextmanager
    def lift_guard(self) -> Iterator[None]:
        """While open, the model may be looked at whether or not its parameters have values."""
        before, self.looked_at = self.looked_at, True
        try:
            with allow_reads(self.parameters):
                yield
        finally:
            self.looked_at = before


def _warn_if_alone() -> None:
    """Warn that a process that torchrun has started next to others trains a model of its own."""
    num_started = os.environ.get("WORLD_SIZE", "1")
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched() and num_started != "1":
        warn(
            f"expected a process group, as torchrun has started {num_started} processes, found none: each trains by "
            f"itself. Call torch.distributed.init_process_group() before zerofx.compile"
        )
