"""The stages of a search, one inside the other, and the trail that they leave."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm import tqdm

from zerofx.progress import watch_progress
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.units import format_bytes, format_seconds


class Stage(Protocol):
    """Settles one part of a problem: tries one or more ways, each with a plan of the stages after it."""

    @property
    def name(self) -> str: ...

    def plan(self, problem: Problem, rest: Search) -> Plan:
        """The best plan for ``problem`` that this stage finds with ``rest``.

        Raises:
            BudgetMissedError: no plan fits the budget; says the least peak that one has.
        """
        ...


@dataclass(frozen=True)
class Trail:
    """Progress of a search: a bar that counts the plans that are tried, and lines where ``ZEROFX_DEBUG`` asks for them.

    ``writes``: whether it writes lines.
    """

    bar: tqdm[Any]
    writes: bool

    def write(self, depth: int, stage: str, text: str) -> None:
        if self.writes:
            sys.stderr.write(f"plan {'  ' * depth}{stage}: {text}\n")

    def describe(self, text: str) -> None:
        """Say what is searched, next to the bar."""
        self.bar.set_description(f"planning ({text})")


@contextmanager
def trail(*, verbose: bool, debug: int) -> Iterator[Trail]:
    """A trail for one search; ``verbose``: whether this rank tells anything."""
    with watch_progress("planning", "plans tried", show=verbose) as bar:
        yield Trail(bar, verbose and debug >= 2)


@dataclass(frozen=True)
class Search:
    """The rest of a search: the stages from the one at ``depth`` on."""

    stages: Sequence[Stage]
    trail: Trail
    depth: int = 0

    def plan(self, problem: Problem) -> Plan:
        """The plan for ``problem``.

        Raises:
            BudgetMissedError: none fits.
        """
        stage = self.stages[self.depth]
        return stage.plan(problem, Search(self.stages, self.trail, self.depth + 1))

    def attempt(self, what: str, problem: Problem) -> Plan:
        """The plan for ``problem``, in which the stage before has settled ``what``, with a line about what it came to.

        Raises:
            BudgetMissedError: none fits.
        """
        self.say(f"{what} ...")
        try:
            plan = self.plan(problem)
        except BudgetMissedError as refusal:
            if self.trail.writes:
                self.say(f"{what}: does not fit, needs {format_bytes(refusal.least_bytes)}")
            raise
        self.say(f"{what}: {outcome(plan)}")
        return plan

    def say(self, text: str) -> None:
        """Write a line about the stage before these: what it tried, or why it stopped."""
        self.trail.write(self.depth - 1, self.stages[self.depth - 1].name, text)


def outcome(plan: Plan) -> str:
    """Outcome of a plan, in a few words."""
    if plan.prediction is None:
        return "as asked"
    return f"peak {format_bytes(plan.peak_bytes['device'])}, step {format_seconds(plan.step_seconds)}"
