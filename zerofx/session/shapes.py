"""The steps that were built so far, by batch shape, optimizer update and the Python state that they were made in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zerofx.capture.objective.module_state import Change as Effect
from zerofx.capture.python_state.reads import Change, Reads
from zerofx.capture.replay import Replay
from zerofx.errors import UsageError, notify
from zerofx.lowering.load import CompiledStep
from zerofx.runtime.comm.comparisons import Gather
from zerofx.units import first_few

T = TypeVar("T")


@dataclass(frozen=True)
class BatchKey:
    """The ``shape`` of all that is in a batch and the ``setting`` that its step runs in, by name.

    ``padded``: what is in it besides the sizes that vary from batch to batch, where ``lengths=`` pads those.
    """

    shape: Mapping[str, str]
    setting: Mapping[str, str]
    padded: str | None

    @property
    def described(self) -> dict[str, str]:
        """Shape and setting."""
        return {**self.shape, **self.setting}

    @property
    def signature(self) -> str:
        """The same as text, which tells steps apart."""
        return lines(self.described)

    @property
    def form(self) -> str:
        """Equal for batches that differ by what varies from batch to batch alone."""
        return self.signature if self.padded is None else f"{self.padded}; {self.setting}"


def lines(described: Mapping[str, str]) -> str:
    """A line for each name with its text."""
    return "\n".join(f"{name}: {text}" for name, text in described.items())


@dataclass(frozen=True)
class Match:
    """The step for a batch as things are now.

    ``compiled`` is None where there is none yet; ``changes`` are those of Python state since the latest such batch, and
    ``reads`` has what was there then, also where there is one. ``number`` is equal on ranks that go on with the same
    step. ``effects`` are what the forward leaves on its modules, ``replay`` does what it does besides tensors.
    """

    compiled: CompiledStep | None
    changes: Sequence[Change]
    number: int
    effects: Sequence[Effect] = ()
    reads: Reads | None = None
    replay: Replay | None = None

    def values_by_rank(self, gather: Gather) -> list[str]:
        """The Python values that have changed on some rank since the latest such batch, on each rank, a line a value.

        Collective.
        """

        def attempt(describe: Callable[[], T], otherwise: T) -> T:
            try:  # values of the user's own classes may raise where they are compared or printed
                return describe()
            except Exception:  # noqa: BLE001 - the other ranks wait for an answer
                return otherwise

        reads = self.reads
        none: list[str] = []
        changed = attempt(lambda: none if reads is None else [change.path for change in reads.changes()], none)
        paths = sorted({path for of_rank in gather(changed) for path in of_rank})
        return list(gather(attempt(lambda: "" if reads is None else reads.values_text(paths), "")))


@dataclass(frozen=True)
class _Built:
    compiled: CompiledStep
    reads: Reads
    number: int
    effects: Sequence[Effect]
    replay: Replay | None


class Shapes:
    """At most ``most`` batch shapes, what is in each, and the compiled steps of each with each update.

    Shapes that differ by what varies from batch to batch alone have one ``form``, and count once. Of one shape and
    update there are at most ``most`` steps, for as many states of what a forward reads of Python.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._described: dict[str, dict[str, str]] = {}  # what is in a batch, by its form
        # By the batch's signature and the update's variant, the latest used last.
        self._steps: dict[tuple[str, str], list[_Built]] = {}
        self.latest: CompiledStep | None = None

    @property
    def is_empty(self) -> bool:
        """True if no batch has been captured yet."""
        return not self._described

    def find(self, signature: str, variant: str) -> Match:
        """The step for a batch and an update whose Python state is as it was captured, if there is one."""
        built, changes = self._steps.get((signature, variant), []), list[Change]()
        latest = built[-1].reads if built else None
        for index in reversed(range(len(built))):
            entry = built[index]
            since = entry.reads.changes()
            if not since:
                built.append(built.pop(index))
                return Match(entry.compiled, (), entry.number, entry.effects, latest, entry.replay)
            changes = changes or since
        return Match(None, changes, len(built), reads=latest)

    def put(
        self,
        key: BatchKey,
        variant: str,
        compiled: CompiledStep,
        reads: Reads,
        effects: Sequence[Effect],
        replay: Replay | None,
    ) -> Match:
        """Add a step, which is the latest from now on, with the Python state that it was captured in."""
        self._described[key.form] = key.described
        built = self._steps.setdefault((key.signature, variant), [])
        built.append(_Built(compiled, reads, len(built), effects, replay))
        self.latest = compiled
        return Match(compiled, (), len(built) - 1, effects, reads, replay)

    def accept(
        self, signature: str, variant: str, reads: Reads, renew: Callable[[CompiledStep], Replay | None]
    ) -> bool:
        """Take the Python state of now for that of ``reads``, of which a step's graph is the same.

        What its forward does besides may be other, and decide something: ``renew`` gives that of now. False, and
        nothing is taken, where that reads more or fewer tensors than the step gives.
        """
        built = self._steps[signature, variant]
        index = next(index for index, entry in enumerate(built) if entry.reads is reads)
        before, replay = built[index].replay, renew(built[index].compiled)
        if replay is not None and replay.num_reads != (0 if before is None else before.num_reads):
            return False
        built[index] = replace(built[index], replay=replay)
        reads.accept()
        return True

    @contextlib.contextmanager
    def learn_own(self, compiled: CompiledStep) -> Iterator[None]:
        """Learn which Python state the forward of ``compiled``, which runs again while open, changes itself."""
        with contextlib.ExitStack() as stack:
            for built in self._steps.values():
                for entry in built:
                    if entry.compiled is compiled:
                        stack.enter_context(entry.reads.learn_own())
            yield

    def replace(self, compiled: CompiledStep, replacement: CompiledStep) -> None:
        """Put ``replacement`` in the place of the latest step, ``compiled``."""
        for built in self._steps.values():
            built[:] = [replace(e, compiled=replacement) if e.compiled is compiled else e for e in built]
        self.latest = replacement

    def forget(self) -> None:
        """Let go of all steps but the latest, which reports may read."""
        self._steps.clear()

    def _announce_change(self, match: Match) -> None:
        """Say that a batch of a known shape is captured anew, as Python state that the forward reads has changed.

        Raises:
            UsageError: that has been so too often; names what changes.
        """
        if match.number >= self._most:
            raise UsageError(
                f"expected Python values that a forward reads to settle, or to be numbers that tensors are computed "
                f"with, found {first_few(map(str, match.changes))} after {match.number} captures of the same batch "
                f"shape: pass what changes as a tensor in the batch, keep it in a buffer, or raise max_shapes"
            )

    def announce(self, key: BatchKey, match: Match) -> None:
        """Say that a batch is about to be captured, if it is of another form, or Python state has changed.

        Raises:
            UsageError: there are as many shapes, or captures of one, as there may be; lists them.
        """
        if key.form not in self._described:
            self._announce_form(key.described)
        if match.changes:
            self._announce_change(match)

    def _announce_form(self, described: Mapping[str, str]) -> None:
        if len(self._described) >= self._most:
            known = "\n".join(
                f"  {', '.join(f'{name}: {text}' for name, text in shape.items())}"
                for shape in self._described.values()
            )
            raise UsageError(
                f"expected at most {self._most} batch shapes, found another: {self._difference(described)}. Pad "
                f"batches to few shapes, pass numbers that change as tensors, or raise max_shapes. Captured so far:\n"
                f"{known}"
            )
        if self._described:
            other = "of another shape" if self._is_another_shape(described) else "in another setting"
            notify(f"a batch {other} is captured and planned anew: {self._difference(described)}")

    def _is_another_shape(self, described: Mapping[str, str]) -> bool:
        """True if a tensor or an argument differs from the nearest known batch, whose names have no blanks."""
        return any(" " not in name for name in self._changes(described))

    def _difference(self, described: Mapping[str, str]) -> str:
        """The differences from the nearest known batch, in words."""
        changes = self._changes(described).items()
        return first_few(f"{name}: {later} (was {earlier})" for name, (earlier, later) in changes)

    def _changes(self, described: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """The differences from the nearest known batch: the value there, and in this one."""
        known = max(self._described.values(), key=lambda shape: len(shape.items() & described.items()))
        both = {name: (known.get(name, "none"), described.get(name, "none")) for name in [*described, *known]}
        return {name: (earlier, later) for name, (earlier, later) in both.items() if earlier != later}
