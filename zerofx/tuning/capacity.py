"""Search the largest micro-batch, or the fewest ranks: ``zerofx.largest_micro_batch`` and ``zerofx.smallest_world``.

Both double until the answer is passed, then bisect. They rely on monotony, which holds up to details of the allocation:
a larger micro-batch takes more memory, and more ranks do not take more than fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from zerofx.budgets import budget_bytes
from zerofx.driver.plan_only import (
    CapturedStep,
    PlannedStep,
    capture_for_plans,
    plan_captured,
    planned_mesh,
)
from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.option_checks import check_count
from zerofx.option_table import check_names
from zerofx.options import CompileOptions, PlanKeywords, check_options
from zerofx.progress import watched
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.units import format_bytes


class SizeTried(NamedTuple):
    """One value that was tried: the peak in bytes on the device of the plan for it, and whether that fits.

    If it does not fit, the peak is the least of any plan.
    """

    value: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    ``value`` is the answer, ``planned`` the step for it, ``tried`` every value that was planned, in that order.
    ``quantity`` names the value, ``limit_bytes`` is the limit for peaks.
    """

    value: int
    planned: PlannedStep
    tried: tuple[SizeTried, ...]
    quantity: str
    limit_bytes: int

    def __str__(self) -> str:
        lines = [
            [
                f"{trial.value}",
                ("" if trial.fits else "at least ") + format_bytes(trial.peak_bytes),
                f"{trial.peak_bytes / self.limit_bytes:.0%}",
                "fits" if trial.fits else "does not fit",
                "<-" if trial.value == self.value else "",
            ]
            for trial in sorted(self.tried)
        ]
        headers = (self.quantity, "peak", f"of {format_bytes(self.limit_bytes)}", "", "")
        align = ("right", "right", "right", "left", "left")
        table = tabulate(lines, headers, colalign=align, disable_numparse=True, tablefmt="simple")
        return f"{self.quantity} {self.value}: {self.planned}\n\n{table}"


def largest_micro_batch(
    make_batch: Callable[[int], tuple[Any, ...] | Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int = 3,
    *,
    limit: int = 4096,
    world_size: int | None = None,
    **plan_options: Unpack[PlanKeywords],
) -> SearchResult:
    """The most samples that one rank can take in one step.

    Args:
        make_batch: gives a micro-batch of n samples, as ``zerofx.plan`` takes one; ``meta`` tensors will do. It is
            called once for each n that is tried.
        model, optimizer, stage: as for ``zerofx.plan``.
        limit: where to stop: nothing above it is tried.
        world_size: number of ranks; None for those of ``mesh``, or one.
        plan_options: other keywords of ``zerofx.plan``. ``memory_budget`` is what must hold the peak; without one it is
            the device's memory. With ``recompute="auto"`` a batch fits if it does with values computed again.

    Raises:
        MemoryBudgetError: not even one sample fits; says the least that it takes, and what dominates there.
        ZeroFXError: as ``zerofx.plan`` would.
    """
    if plan_options.get("accumulate", 1) != 1:
        raise UsageError("expected no accumulate for largest_micro_batch, which looks for the size of one micro-batch")
    check_count("a limit", limit, 1, "of at least 1")
    options = _options(stage, plan_options, "largest_micro_batch")
    mesh = planned_mesh(options, world_size)

    def attempt(samples: int) -> PlannedStep:
        return plan_captured(
            capture_for_plans(model, optimizer, make_batch(samples), options, verbose=False), mesh, verbose=False
        )

    with _Trials("micro-batch", attempt).show_progress() as trials:
        if not trials.fits(1):
            raise MemoryBudgetError(f"expected a micro-batch of 1 to fit: {trials.refusals[1]}")
        fitting, missed = 1, limit + 1
        while fitting < limit and missed > limit:
            following = min(2 * fitting, limit)
            if trials.fits(following):
                fitting = following
            else:
                missed = following
        return trials.result(trials.border(fitting, missed, 1), _limit_bytes(options))


def smallest_world(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...] | Mapping[str, Any],
    stage: int = 3,
    *,
    limit: int = 65536,
    **plan_options: Unpack[PlanKeywords],
) -> SearchResult:
    """The fewest ranks on which a step fits: any number in one node of the machine, whole nodes beyond.

    Args:
        model, optimizer, batch, stage: as for ``zerofx.plan``; the model is captured once.
        limit: where to stop: more ranks are not tried.
        plan_options: keywords of ``zerofx.plan`` but ``world_size``; ``memory_budget`` as for ``largest_micro_batch``.

    Raises:
        MemoryBudgetError: it fits on no number of ranks up to the limit; says the least that it takes, and what
            dominates there.
        ZeroFXError: as ``zerofx.plan`` would.
    """
    if "world_size" in plan_options:
        raise UsageError("expected no world_size for smallest_world, which looks for it: give it to zerofx.plan")
    if plan_options.get("mesh") is not None:
        raise UsageError(
            "expected no mesh for smallest_world, which looks for a number of ranks along shard: give it to zerofx.plan"
        )
    check_count("a limit", limit, 1, "of at least 1")
    captured = capture_for_plans(model, optimizer, batch, _options(stage, plan_options, "smallest_world"))
    node = captured.machine.ranks_per_node

    def attempt(ranks: int) -> PlannedStep:
        return plan_captured(captured, Mesh(shard=ranks), verbose=False)

    with _Trials("ranks", attempt).show_progress() as trials:
        missed = 0
        for fitting in _double(node, limit):
            if trials.fits(fitting):
                break
            missed = fitting
        else:
            raise MemoryBudgetError(
                f"expected {_most(captured, limit)} to be enough: with {trials.least.value} of them, "
                f"{trials.refusals[trials.least.value]}"
            )
        unit = 1 if fitting <= node else node
        return trials.result(trials.border(fitting, missed, unit), _limit_bytes(captured.request.options))


class _Trials:
    """The plans that were tried, each once."""

    def __init__(self, quantity: str, attempt: Callable[[int], PlannedStep]) -> None:
        self.refusals: dict[int, str] = {}
        self._quantity = quantity
        self._attempt = attempt
        self._tried: list[SizeTried] = []
        self._fitting: PlannedStep | None = None  # the last that fits: with a search's end, its answer
        self._bar: tqdm[Any] | None = None

    @contextmanager
    def show_progress(self) -> Iterator[_Trials]:
        """Show a progress bar, if it takes long: the current value, since the search's length is unknown."""
        with watched(f"{self._quantity} 1", "plans") as self._bar:
            yield self

    def border(self, fitting: int, missed: int, unit: int) -> int:
        """The multiple of ``unit`` that fits, next to one that does not, between ``fitting`` and ``missed``."""
        while abs(fitting - missed) > unit:
            middle = (fitting // unit + missed // unit) // 2 * unit
            fitting, missed = (middle, missed) if self.fits(middle) else (fitting, middle)
        return fitting

    def fits(self, value: int) -> bool:
        """Plan for ``value``; true if it fits."""
        assert self._bar is not None
        self._bar.set_description(f"{self._quantity} {value}", refresh=False)
        try:
            planned = self._attempt(value)
        except BudgetMissedError as error:
            self.refusals[value] = str(error)
            self._tried.append(SizeTried(value, error.least_bytes, False))
        else:
            self._fitting = planned
            self._tried.append(SizeTried(value, planned.plan.peak_bytes["device"], True))
        self._bar.update()
        return self._tried[-1].fits

    @property
    def least(self) -> SizeTried:
        """The trial of the least peak."""
        return min(self._tried, key=lambda trial: trial.peak_bytes)

    def result(self, value: int, limit_bytes: int) -> SearchResult:
        """The outcome of the search: ``value``, the last that fits."""
        assert self._fitting is not None and [trial.value for trial in self._tried if trial.fits][-1] == value
        return SearchResult(value, self._fitting, tuple(self._tried), self._quantity, limit_bytes)


def _double(node: int, limit: int) -> Iterator[int]:
    """Numbers of ranks: 1, 2, 4 and so on to a whole node, then whole nodes, up to the limit."""
    ranks, last = 1, _last(node, limit)
    while ranks < last:
        yield ranks
        ranks = min(2 * ranks, last, *([node] if ranks < node else []))
    yield last


def _last(node: int, limit: int) -> int:
    return limit if limit < node else limit // node * node


def _most(captured: CapturedStep, limit: int) -> str:
    machine = captured.machine
    last = _last(machine.ranks_per_node, limit)
    return f"up to {last} rank{'s' if last > 1 else ''} of {machine.name} at stage {captured.request.options.stage}"


def _options(stage: int, plan_options: PlanKeywords, function: str) -> CompileOptions:
    """The options of ``zerofx.plan`` with its defaults, but for the budget: without one it is the whole device."""
    check_names(plan_options, PlanKeywords, function)
    budget = plan_options.get("memory_budget")
    completed: PlanKeywords = {
        "machine": "h100-sxm",
        **plan_options,
        "memory_budget": 1.0 if budget is None else budget,
    }
    return check_options(stage=stage, **completed)


def _limit_bytes(options: CompileOptions) -> int:
    assert options.machine is not None
    limit = budget_bytes(options.memory_budget, options.machine)
    assert limit is not None
    return limit
