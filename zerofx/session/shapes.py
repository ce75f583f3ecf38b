"""The steps that were built so far, by batch shape and optimizer update."""

from __future__ import annotations

from collections.abc import Mapping

from zerofx.errors import UsageError, notify
from zerofx.lowering.load import CompiledStep
from zerofx.units import first_few


class Shapes:
    """At most ``most`` batch shapes, what is in each, and the compiled step of each with each update.

    Shapes that differ by what varies from batch to batch alone have one ``form``, and count once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._described: dict[str, dict[str, str]] = {}  # what is in a batch, by its form
        self._steps: dict[tuple[str, str], CompiledStep] = {}  # by the batch's signature and the update's variant
        self.latest: CompiledStep | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no batch has been captured yet."""
        return not self._described

    def take(self, signature: str, variant: str) -> CompiledStep | None:
        """The step for a batch and an update, which is the latest from now on; None where there is none yet."""
        compiled = self._steps.get((signature, variant))
        if compiled is not None:
            self.latest = compiled
        return compiled

    def put(
        self, signature: str, variant: str, described: Mapping[str, str], compiled: CompiledStep, form: str
    ) -> None:
        """Add a step, which is the latest from now on."""
        self._described[form] = dict(described)
        self._steps[signature, variant] = self.latest = compiled

    def replace(self, compiled: CompiledStep, replacement: CompiledStep) -> None:
        """Put ``replacement`` in the place of the latest step, ``compiled``."""
        self._steps = {key: replacement if value is compiled else value for key, value in self._steps.items()}
        self.latest = replacement

    def forget(self) -> None:
        """Let go of all steps but the latest, which reports may read."""
        self._steps.clear()

    def announce(self, form: str, described: Mapping[str, str]) -> None:
        """Say that a batch of another form is about to be captured, if it is one.

        Raises:
            UsageError: there are as many shapes as there may be; lists them.
        """
        if form in self._described:
            return
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
        """Whether a tensor or an argument is another than in the nearest known batch, whose names have no blanks."""
        return any(" " not in name for name in self._changes(described))

    def _difference(self, described: Mapping[str, str]) -> str:
        """What the nearest known batch has otherwise, in words."""
        changes = self._changes(described).items()
        return first_few(f"{name}: {later} (was {earlier})" for name, (earlier, later) in changes)

    def _changes(self, described: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """What the nearest known batch has otherwise: there, and in this one."""
        known = max(self._described.values(), key=lambda shape: len(shape.items() & described.items()))
        both = {name: (known.get(name, "none"), described.get(name, "none")) for name in [*described, *known]}
        return {name: (earlier, later) for name, (earlier, later) in both.items() if earlier != later}
