"""Search the largest micro-batch, or the fewest ranks: ``zerofx.largest_micro_batch`` and ``zerofx.smallest_world``.

Both are one search: sizes double until the answer is passed, then it bisects. It relies on monotony, which holds up to
details of the allocation: a larger micro-batch takes more memory, and more ranks do not take more than fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from zerofx.budgets import budget_bytes
from zerofx.driver.plan_only import PlannedStep, capture_for_plans, mesh_to_plan, plan_captured
from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.optimizers import Optimizers
from zerofx.option_checks import check_count
from zerofx.option_table import check_names
from zerofx.options import CompileOptions, PlanKeywords, check_options
from zerofx.progress import watch_progress
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.units import format_bytes, text_table


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
        return f"{self.quantity} {self.value}: {self.planned}\n\n{text_table(lines, headers, left=(3, 4))}"


def largest_micro_batch(
    make_batch: Callable[[int], tuple[Any, ...] | Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
    mesh, optimizers = mesh_to_plan(options, world_size), Optimizers.from_user(optimizer, options.average)

    def attempt(samples: int) -> PlannedStep:
        return plan_captured(
            capture_for_plans(model, optimizers, make_batch(samples), options, verbose=False), mesh, verbose=False
        )

    def refuse(_: int, refusal: str) -> str:
        return f"expected a micro-batch of 1 to fit: {refusal}"

    sizes = range(1, limit + 1)
    return _search("micro-batch", sizes, attempt, refuse, _limit_bytes(options), grows=True)


def smallest_world(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
    options = _options(stage, plan_options, "smallest_world")
    captured = capture_for_plans(model, Optimizers.from_user(optimizer, options.average), batch, options)
    node = captured.machine.ranks_per_node

    def attempt(ranks: int) -> PlannedStep:
        return plan_captured(captured, Mesh(shard=ranks), verbose=False)

    sizes = [*range(1, min(node, limit) + 1), *range(2 * node, limit + 1, node)]

    def refuse(ranks: int, refusal: str) -> str:
        most = f"up to {sizes[-1]} rank{'s' if sizes[-1] > 1 else ''} of {captured.machine.name}"
        stage = captured.request.options.stage
        return f"expected {most} at stage {stage} to be enough: with {ranks} of them, {refusal}"

    limit_bytes = _limit_bytes(captured.request.options)
    return _search("ranks", sizes, attempt, refuse, limit_bytes, grows=False)


def _search(
    quantity: str,
    sizes: Sequence[int],
    attempt: Callable[[int], PlannedStep],
    refuse: Callable[[int, str], str],
    limit_bytes: int,
    *,
    grows: bool,
) -> SearchResult:
    """Find the last of ``sizes`` that fits where steps grow with them (``grows``), or else the first.

    Raises:
        MemoryBudgetError: none fits; ``refuse`` words it, for the trial of the least peak and its refusal.
    """
    tried: list[SizeTried] = []
    refusals: dict[int, str] = {}
    fitting: PlannedStep | None = None  # the last that fits: with the search's end, its answer
    with watch_progress(f"{quantity} {sizes[0]}", "plans") as bar:

        def turns(value: int) -> bool:
            """Plan for ``value``; true from the first size on at which it no longer fits, or does at last."""
            nonlocal fitting
            bar.set_description(f"{quantity} {value}", refresh=False)
            try:
                planned = attempt(value)
            except BudgetMissedError as error:
                refusals[value] = str(error)
                tried.append(SizeTried(value, error.least_bytes, False))
            else:
                fitting = planned
                tried.append(SizeTried(value, planned.plan.peak_bytes["device"], True))
            bar.update()
            return tried[-1].fits != grows

        before, place = -1, 0
        while place < len(sizes) and not turns(sizes[place]):
            before = place
            place = bisect_right(sizes, 2 * sizes[place]) - 1 if place < len(sizes) - 1 else len(sizes)
        while place - before > 1 and fitting is not None:
            middle = (before + place) // 2
            before, place = (before, middle) if turns(sizes[middle]) else (middle, place)
    if fitting is None:
        least = min(tried, key=lambda trial: trial.peak_bytes)
        raise MemoryBudgetError(refuse(least.value, refusals[least.value]))
    value = [trial.value for trial in tried if trial.fits][-1]
    return SearchResult(value, fitting, tuple(tried), quantity, limit_bytes)


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
