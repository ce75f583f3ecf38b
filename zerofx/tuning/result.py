"""The result of ``zerofx.tune``: every candidate with its prediction and measurement, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_bytes, format_seconds, text_table

_HEADERS = ("candidate", "peak", "measured", "time", "corrected", "measured", "")


@dataclass(frozen=True)
class Candidate:
    """A plan that could be the best.

    ``plan`` has the prediction from the machine's own numbers; None if it could not be made. ``corrected`` is the
    prediction from measured costs, ``measured`` the measurement (of several ranks, the longest times and the highest
    peaks); None if that was not done. ``outcome`` is the result in words.
    """

    name: str
    plan: Plan | None
    outcome: str = ""
    corrected: Prediction | None = None
    measured: Measurement | None = None

    @property
    def is_open(self) -> bool:
        """True if it may still be run."""
        return self.plan is not None and self.measured is None and not self.outcome


@dataclass(frozen=True)
class TuneResult:
    """The result of ``zerofx.tune``; ``print`` shows the candidates as a table.

    ``candidates`` are all that were considered, ``best`` is the fastest that fits. ``costs`` are the measured costs,
    from which further plans were made.
    """

    candidates: tuple[Candidate, ...]
    best: Candidate
    costs: MeasuredCosts
    memory_budget: int | None

    @property
    def plan(self) -> Plan:
        """The best plan, for ``zerofx.compile(plan=...)``; its prediction is that from measured costs."""
        assert self.best.plan is not None and self.best.corrected is not None
        return self.best.plan.with_prediction(self.best.corrected)

    @property
    def measured(self) -> Measurement:
        """The measurement of the best plan."""
        assert self.best.measured is not None
        return self.best.measured

    def __str__(self) -> str:
        budget = "" if self.memory_budget is None else f" within {format_bytes(self.memory_budget)}"
        peak, seconds = self.measured.peak_bytes["device"], self.measured.step_seconds
        return (
            f"{self.best.name}: the fastest{budget}, {format_seconds(seconds)} a step, peak {format_bytes(peak)}; "
            f"regions take {self.costs.scale:.2g} times what is predicted{self._links()}\n\n"
            f"{candidate_table(self.candidates)}"
        )

    def _links(self) -> str:
        return "".join(
            f"; {stream}: {format_seconds(link.latency)} and {format_bytes(1 / link.seconds_per_byte)}/s"
            for stream, link in self.costs.links.items()
        )


def candidate_table(candidates: Sequence[Candidate]) -> str:
    """A line per candidate: peak on the device and time of a step, predicted and measured, and its outcome."""
    lines = []
    for candidate in candidates:
        predicted = candidate.plan.prediction if candidate.plan is not None else None
        measured, corrected = candidate.measured, candidate.corrected
        lines.append([
            candidate.name,
            format_bytes(predicted.peak_bytes["device"]) if predicted else "",
            format_bytes(measured.peak_bytes["device"]) if measured else "",
            format_seconds(predicted.step_seconds) if predicted else "",
            format_seconds(corrected.step_seconds) if corrected else "",
            format_seconds(measured.step_seconds) if measured else "",
            candidate.outcome,
        ])  # fmt: skip
    return text_table(lines, _HEADERS, left=(0, 6))
