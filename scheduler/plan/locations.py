"""Where parameters and optimizer states lie between steps, for evaluations, which move none of them."""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.scheduler.plan.decisions import ParameterDecision, StateDecision


@dataclass(frozen=True)
class Locations:
    """The buckets whose parameters, or states, are in a slower tier; all others have theirs on the device."""

    parameters: tuple[ParameterDecision, ...] = ()
    states: tuple[StateDecision, ...] = ()
