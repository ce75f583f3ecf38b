"""Meshes side by side: the cost of a step on each, and the reason for the choice."""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.scheduler.plan.mesh import Mesh
from zerofx.units import format_bytes, format_seconds, text_table

_HEADERS = ("mesh", "peak", "step", "per sample", "exposed", "within nodes", "across nodes", "")


@dataclass(frozen=True)
class MeshOutcome:
    """The predicted costs of one rank in a step on a mesh.

    ``num_samples`` are those of all ranks together, which give ``seconds_per_sample``. ``peak_bytes`` are on the device
    and ``limit_bytes`` is its capacity, or the budget. ``wire_bytes`` are the bytes that the ranks of the first node
    send together, by destination. ``is_planned``: whether the mesh was planned and simulated whole; else the numbers
    are estimates from a few of its layers. ``is_least``: whether it was skipped because of a lower bound; the seconds,
    and the peak if it is known, are that bound then. ``trouble`` is the reason why it is impossible, if it is.
    """

    mesh: Mesh
    num_samples: int
    peak_bytes: int = 0
    limit_bytes: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    wire_bytes: dict[str, int] | None = None
    is_least: bool = False
    is_planned: bool = False
    trouble: str = ""

    @property
    def seconds_per_sample(self) -> float:
        """Seconds of a step divided by the samples of all ranks together."""
        return self.step_seconds / self.num_samples

    @property
    def fits(self) -> bool:
        """True if the mesh is possible, as far as was found."""
        return not self.trouble and not self.is_least and self.peak_bytes <= self.limit_bytes

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        if self.trouble:
            return "cannot be"
        if self.peak_bytes > self.limit_bytes:
            return "does not fit"
        return "slower" if self.is_least else "fits"


@dataclass(frozen=True)
class MeshComparison:
    """All compared meshes, the best of those that fit first, and the reason for it; ``without_stages``: why none has an
    axis ``pipe``, where micro-batches would allow it."""

    outcomes: tuple[MeshOutcome, ...]
    reason: str
    without_stages: str = ""

    @property
    def best(self) -> MeshOutcome:
        """The chosen mesh."""
        return self.outcomes[0]

    def __str__(self) -> str:
        shown, rest = list[MeshOutcome](), list[MeshOutcome]()
        for outcome in self.outcomes:  # those with stages that are skipped are many, and say little
            is_skipped = outcome.mesh.pipe > 1 and outcome.verdict == "slower"
            (rest if is_skipped and any(each.mesh.pipe > 1 for each in shown) else shown).append(outcome)
        rows = [_row(outcome) for outcome in shown]
        table = text_table(rows, _HEADERS, left=(0, 7))
        troubles = {outcome.trouble: outcome.mesh for outcome in reversed(self.outcomes) if outcome.trouble}
        notes = [f"{mesh}: {trouble}" for trouble, mesh in troubles.items()]
        if rest:
            least = format_seconds(min(outcome.seconds_per_sample for outcome in rest))
            notes.insert(0, f"{len(rest)} more meshes with an axis pipe take {least} a sample or longer")
        if self.without_stages:
            notes.append(f"no mesh with an axis pipe: {self.without_stages}")
        return "\n".join([table, *notes, self.reason])


def _row(outcome: MeshOutcome) -> tuple[str, ...]:
    if not outcome.step_seconds:
        return (str(outcome.mesh), *[""] * 6, outcome.verdict)
    about = "" if outcome.is_planned else ">" if outcome.is_least else "~"
    taken = [format_bytes(outcome.peak_bytes), format_seconds(outcome.step_seconds)]
    taken.append(format_seconds(outcome.seconds_per_sample))
    if not outcome.is_least:
        wire = outcome.wire_bytes or {}
        taken += [format_seconds(outcome.exposed_seconds)]
        taken += [format_bytes(wire.get(where, 0)) for where in ("within", "across")]
    taken[0] = taken[0] if outcome.peak_bytes else ""
    columns = [about + text if text else "" for text in taken] + [""] * (6 - len(taken))
    return (str(outcome.mesh), *columns, outcome.verdict)
