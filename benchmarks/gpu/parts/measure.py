"""Part (f): ``Machine.measure()``, and predicted next to measured times of whole steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu.case import Case, Entry, worker
from benchmarks.gpu.parts.memory import named, step_case
from benchmarks.gpu.setup import Setup

MACHINE = "Machine.measure()"
SHARES = (None, 0.6, 0.35)  # of the peak without a budget


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """The machine, then steps that are planned with what was measured of it."""
    sizes = setup.sizes
    yield worker(MACHINE, "machine_worker", {"device": setup.device, "drive": str(setup.drive)})
    machine = entries[MACHINE].results.get("machine")
    if machine is None:
        return  # the case before says why
    shapes: tuple[tuple[str, dict[str, int]], ...] = (
        (sizes.shape, {}),
        (sizes.deep, {"depth": sizes.deep_layers}),
        ("27m" if setup.device == "cuda" else "tiny", {}),
    )
    for share in SHARES:
        for shape, changes in shapes:
            for backend in reversed(sizes.backends):
                prefix = named(shape, changes, backend)
                yield step_case(prefix, shape, changes, backend, share, setup, entries, machine=machine)
