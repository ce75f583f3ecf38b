"""Agreement between ranks outside the step: small objects over a gloo group of its own, always within a timeout.

Ranks that meet exchange the purpose of the meeting, so that ranks in different places are told apart at once. A rank
that does not come is identified when the timeout is over: the ranks that waited leave a note (``notes.py``), and a rank
without a note was absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not listed as public

from zerofx.errors import RankMismatchError, TierError, ZeroFXError
from zerofx.runtime.comm.comparisons import Comparison, check_comparisons, check_equal
from zerofx.runtime.comm.groups import close_connections, destroy_with, gloo_over
from zerofx.runtime.comm.heartbeat import (
    WAYS_TO_WAIT,
    JointWork,
    SilentRankError,
    Watch,
    rank_timeout_seconds,
    wait_for,
)
from zerofx.runtime.comm.notes import Notes, Outcomes
from zerofx.runtime.comm.transport import LostRankError

T = TypeVar("T")

_PURPOSE_BYTES = 96  # of a header; a SHA-256 follows, and a note
_NOTE_BYTES = 32
_IN_ORDER = (
    "Every rank must call the same things in the same order. Where one is about to raise an error, mend what that says."
)
_GRACE_SECONDS = 1.0  # for the others to come to a meeting that this rank leaves after


class Control:
    """The side channel on which ranks compare and share plans. For a world of one it does nothing.

    A rank is waited for at most ``timeout_seconds``, or the timeout of ``group`` if that is less; a rank with work to
    do (``attempt``, ``share``) for as long as it sends heartbeats. ``purpose`` completes "expected all ranks to ..." if
    a rank does not come to open the channel.

    Raises:
        RankMismatchError: from every method, where a rank does not come in time or does something else; names it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_seconds: float, purpose: str = "call zerofx.compile"
    ) -> None:
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.rank_timeout_seconds = rank_timeout_seconds(group, timeout_seconds)
        self.lost = ""  # why nothing can be agreed on any more: ``rank 1 ...``
        self._timeout = timedelta(seconds=self.rank_timeout_seconds)
        self._group: dist.ProcessGroup | None = None
        self._num_meetings = self._num_works = 0
        self._begun: dist.Work | None = None
        self._last_work: JointWork | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._watch: Watch | None = None
        self._leave: Callable[[], object] = bool
        if self.num_ranks > 1:
            assert group is not None
            self._notes = Notes(self.rank, self.num_ranks, self.rank_timeout_seconds)
            self._group = self._connect(group, purpose)
            self._end = destroy_with(self, self._group)

    def _connect(self, group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
        """A gloo group over the same ranks, once all of them want one."""
        try:
            self._notes.begin()
        except RuntimeError as error:
            absence = self._absence(purpose, error)
            self._notes.withdraw()
            raise absence from error
        try:
            return self._notes.ask(lambda: gloo_over(group, self._timeout), 2 * self.rank_timeout_seconds)
        except RuntimeError as error:
            raise self._absence(purpose, error) from error

    def start(
        self,
        purpose: str,
        compare: Callable[[], Sequence[Comparison]] = tuple,
        note: bytes = b"",
        check: Callable[[Sequence[bytes]], None] | None = None,
    ) -> Callable[[], Sequence[bytes]]:
        """Begin a comparison between all ranks; the returned function waits for the outcome, and raises if need be.

        That function returns every rank's ``note``, in rank order.

        Args:
            purpose: completes "expected all ranks to ..."; ranks with different purposes do not agree either.
            compare: gives the comparisons, as many on all ranks with this purpose; not called where there is one rank.
            note: at most 32 bytes that may differ.
            check: is given the notes of all ranks, in their order, once all of them agree, and may raise.
        """
        group = self._group
        if group is None:
            return lambda: [note]
        self._num_meetings += 1
        compared = compare()
        digest = hashlib.sha256("\0".join(part.text for part in compared).encode(errors="surrogatepass")).digest()
        header = purpose.encode(errors="replace")[:_PURPOSE_BYTES].ljust(_PURPOSE_BYTES) + digest
        mine = torch.tensor(list(header + note.ljust(_NOTE_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        seen = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        try:
            work = self._begun = dist.all_gather(seen, mine, group=group, async_op=True)
        except RuntimeError as error:
            raise self._absence(purpose, error) from error

        def finish() -> Sequence[bytes]:
            self._begun = None
            try:
                assert work is not None
                wait_for(work, self.rank_timeout_seconds)
            except RuntimeError as error:
                raise self._absence(purpose, error) from error
            headers = [bytes(header[:-_NOTE_BYTES].tolist()) for header in seen]
            purposes = [header[:_PURPOSE_BYTES].decode(errors="ignore").strip() for header in headers]
            check_equal(purposes, "call", _IN_ORDER)
            if any(header != headers[0] for header in headers):
                check_comparisons(compared, lambda value: self._exchange(value, purpose))
            notes = [bytes(header[-_NOTE_BYTES:].tolist()) for header in seen]
            if check is not None:
                check(notes)
            return notes

        return finish

    def agree(self, purpose: str, value: str, what: str, hint: str) -> None:
        """Check that all ranks have the same ``value``; see ``start``."""
        self.start(purpose, lambda: [Comparison(what, value, hint)])()

    def meet(self, purpose: str) -> None:
        """Wait for all ranks."""
        self.start(purpose)()

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self._group is None:
            return [value]
        self.meet(purpose)
        return self._exchange(value, purpose)

    def broadcast(self, value: Any, purpose: str) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        self.meet(purpose)
        box = [value if self.rank == 0 else None]
        try:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        except RuntimeError as error:
            raise self._absence(purpose, error) from error
        return box[0]

    def share(self, purpose: str, make: Callable[[], T]) -> T:
        """The result of ``make()`` on rank 0, on every rank; it is called on rank 0 only.

        Raises:
            ZeroFXError: the error raised on rank 0, on every rank.
            Exception: any other error, on rank 0; the others raise a ``RankMismatchError`` that says so.
        """

        def run_on_rank_0() -> tuple[T | None, ZeroFXError | None]:
            try:
                return make() if self.rank == 0 else None, None
            except ZeroFXError as error:
                return None, error

        shared, failure = self.broadcast(self.attempt(purpose, run_on_rank_0), purpose)
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # as in attempt
        return cast(T, shared)

    def attempt(self, purpose: str, function: Callable[[], T]) -> T:
        """Call ``function()`` on every rank; if it fails on any rank, every rank raises.

        Raises:
            Exception: the error that ``function`` raised here.
            RankMismatchError: it failed on another rank; names that rank and its error.
        """
        failed: Exception | None = None
        # Where the ranks cannot be reached, this rank's own error is what its user needs.
        try:
            with self._joint_work(purpose):
                try:
                    result = function()
                except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
                    failed = error
            description = f"{type(failed).__name__}: {failed}" if failed is not None else None
            failures = self.gather(description, purpose)
        except RankMismatchError as unreachable:
            if failed is None:
                raise
            failed.add_note(f"The other ranks could not be told: {unreachable}")
            failures = []
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback has this frame, which would keep all that it reaches
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RankMismatchError(f"expected all ranks to {purpose}, found that rank {rank} could not: {failure}")
        return result

    @contextlib.contextmanager
    def fail_together(self, purpose: str) -> Iterator[None]:
        """A block in which ranks move tensors between one another: if it fails on one rank, it fails on all.

        Raises:
            RankMismatchError: a rank did not come, or has failed.
        """
        try:
            yield
        except BaseException as error:
            agreed = isinstance(error, ZeroFXError) and not isinstance(error, (LostRankError, TierError))
            if self._group is None or agreed:
                raise
            elsewhere = self.failure()
            self.fail(elsewhere or f"rank {self.rank} could not {purpose} ({type(error).__name__}: {error})")
            if elsewhere or isinstance(error, RuntimeError):
                raise RankMismatchError(
                    f"expected all {self.num_ranks} ranks to {purpose}, found that {elsewhere or error}. Restart all "
                    f"ranks from a checkpoint"
                ) from error
            raise

    @contextlib.contextmanager
    def report_interrupts(self, purpose: str) -> Iterator[None]:
        """A block that ranks run together: if this rank is interrupted in it, the others are told at once."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            self.fail(f"rank {self.rank} was to {purpose} ({type(error).__name__})")
            raise

    @contextlib.contextmanager
    def report_errors(self) -> Iterator[None]:
        """A block before a meeting: an error of this rank in it is raised on the others at the meeting."""
        try:
            yield
        except ZeroFXError as error:
            self.start(f"raise {type(error).__name__}: {error}")
            raise

    def call_on_failure(self, call: Callable[[], None]) -> None:
        """Register ``call`` to run if this rank fails, so that ranks waiting for it elsewhere fail too."""
        self._on_failure.append(call)

    def watch(self) -> None:
        """Listen on a thread for a rank that fails or is gone, and fail here too: ``call_on_failure`` calls run on it.

        Collective: a rank that does not watch breaks the connection when it ends.
        """
        if self._group is not None and self._watch is None:
            self._watch = Watch(self._group, self._hear)
            self._leave = weakref.finalize(self, self._watch.leave)  # also where the process ends

    def _hear(self) -> None:
        """Handle the next rank's end: it has failed, has heard of one that has, or is gone."""
        if self.lost or self._group is None or self._watch is None:
            return
        if not self._notes.failure():
            self._notes.tell_failure(f"rank {self._watch.next_rank} is gone")
        self._lose(self._notes.failure() or f"rank {self._watch.next_rank} is gone")

    def fail(self, what: str) -> None:
        """Tell the other ranks that this one has failed, and how; from here on they fail where they wait for it."""
        if self._group is None or self.lost:
            return
        self._notes.tell_failure(what)
        self._lose(what)

    def _lose(self, why: str) -> None:
        """Stop all agreement; ranks that wait for this one fail too."""
        assert self._group is not None
        self.lost = why
        close_connections(self._group)
        for call in self._on_failure:
            call()

    def outcomes(self, name: str) -> Outcomes:
        """Outcomes of work that each rank does in a thread of its own; ``name`` is unique for each piece of work."""
        return Outcomes(HashStore(), name, 0, 1) if self._group is None else self._notes.outcomes(name)

    def failure(self) -> str:
        """``rank 1 ...``: the first failure that a rank has reported; empty if none has."""
        return "" if self._group is None else self._notes.failure()

    def close(self) -> None:
        """Destroy the group, after the last meeting of all ranks; nothing can be agreed on after it."""
        group, self._group = self._group, None
        # Connections end with the last name for their group.
        self._last_work = None
        self._on_failure.clear()
        self._leave()
        self._watch = None
        if group is not None:
            self._end()

    def leave(self) -> None:
        """Destroy the group on this rank alone: ranks that wait for it there fail at once.

        A meeting that this rank has begun may still be telling the others that it leaves, and why. If they do not come
        to it within a second, the group is not destroyed, since that would wait for them.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            with contextlib.suppress(RuntimeError):
                begun.wait(timedelta(seconds=_GRACE_SECONDS))
            if not begun.is_completed():
                return
        self.close()

    def ranks_of_host(self, purpose: str) -> list[int]:
        """The ranks on this rank's host, including itself, in order."""
        hosts = self.gather(socket.gethostname(), purpose)
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def divide(self, items: list[str]) -> tuple[list[str], list[str]]:
        """This rank's share of ``items`` among the ranks of its host, and the rest: for work whose results the ranks of
        a host share through a cache."""
        local = self.ranks_of_host("divide work")
        share = local.index(self.rank)
        mine = items[share :: len(local)]
        return mine, [item for item in items if item not in mine]

    @contextlib.contextmanager
    def _joint_work(self, purpose: str) -> Iterator[None]:
        """A block of work on some ranks, for which the others wait as long as heartbeats arrive."""
        if self._group is None:
            yield
            return
        self._num_works += 1
        try:
            with (
                self.report_interrupts(purpose),
                JointWork(self._group, self._num_works, self.rank_timeout_seconds) as work,
            ):
                yield
                work.finish()
            self._last_work = work  # whose last words may still be on their way
        except SilentRankError as error:
            raise self._absence(purpose, error, error.rank) from error

    def _exchange(self, value: Any, purpose: str) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._absence(purpose, error) from error
        return values

    def _absence(self, purpose: str, error: Exception, known: int | None = None) -> RankMismatchError:
        """The error for a meeting that failed, naming the rank that has failed before or the absent ranks.

        ``known`` is a rank known to be absent. Nothing can be agreed on afterwards.
        """
        if failure := self.failure():
            if not self.lost:
                self._lose(failure)
            return RankMismatchError(
                f"expected all {self.num_ranks} ranks to {purpose}, found that {failure}. Restart all ranks from a "
                f"checkpoint"
            )
        missing = f"rank {known}" if known is not None else self._notes.absent_ranks(self._num_meetings)
        what = f"{missing} did not come to {purpose}"
        if self._group is not None:
            self.fail(what)
        return RankMismatchError(
            f"expected all {self.num_ranks} ranks to {purpose} within {self.rank_timeout_seconds:.0f} s, but {missing} "
            f"did not come, while rank {self.rank} did. Every rank must call the same things in the same order; "
            f"look for an error on the missing ranks, or {WAYS_TO_WAIT}. {_first_line(error)}"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
