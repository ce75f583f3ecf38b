"""The texts that ``ZEROFX_DEBUG`` prints of a lowered step."""

from __future__ import annotations

import sys

from zerofx.lowering.lower import LoweredStep
from zerofx.report.schedule import make_schedule


def write_debug(lowered: LoweredStep, debug: int) -> None:
    """Write the schedule to stderr from level 3 on, and the emitted source from level 4 on."""
    if debug >= 3:
        sys.stderr.write(f"{make_schedule(lowered)}\n")
    if debug >= 4:
        sys.stderr.write(lowered.emitted.source)
