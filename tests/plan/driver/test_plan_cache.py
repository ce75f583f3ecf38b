"""A searched plan that was kept is the plan that would be found, for the same question alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zerofx
from tests.lib.models import DIM, Layer, adamw
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search import target
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.scheduler.search.stages.refine import Wire
from zerofx.torch_private.operators import disable_onednn

BUDGET = 45_000  # bytes: less than is needed without recomputing


class Searches:
    """Builds the step of a small model, and counts the plans that were searched for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.count = 0
        self._folder = folder

        search = Wire.plan

        def counted(wire: Wire, problem: Problem, rest: Search) -> Plan:
            self.count += 1
            return search(wire, problem, rest)

        monkeypatch.setattr(Wire, "plan", counted)

    def run(self, **options: Any) -> tuple[int, str, str, list[Tensor]]:
        """Number of searches, and the plan, the source and the losses of two steps."""
        before = self.count
        for path in self._folder.glob("step-*"):
            path.unlink()  # with its step kept whole, no plan is asked for
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Layer() for _ in range(4)))
        optimizer = options.pop("optimizer", adamw)(model)
        batch = (torch.randn(64, DIM), torch.randn(64, DIM))
        given: dict[str, Any] = {
            "memory_budget": BUDGET,
            "backend": "eager",
            "loss_fn": lambda out, x, y: F.mse_loss(out, y),
        } | options
        step = zerofx.compile(model, optimizer, stage=given.pop("stage", 3), **given)
        losses = [step(*batch).clone() for _ in range(2)]
        assert step.plan is not None
        found = self.count - before, step.plan.to_json(), step.source, losses
        step.close()
        return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Searches:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    return Searches(monkeypatch, tmp_path)


def _kept(folder: Path) -> list[Path]:
    return list(folder.glob("plan-*"))


@pytest.mark.days(3)
def test_a_plan_is_searched_for_once_and_trains_the_same_bits(searches: Searches, tmp_path: Path) -> None:
    first, again = searches.run(), searches.run()
    assert (first[0], again[0]) == (1, 0) and len(_kept(tmp_path)) == 1
    assert first[1:3] == again[1:3]
    assert Plan.from_json(first[1]).recomputes
    assert all(map(torch.equal, first[3], again[3]))


@pytest.mark.slow
def test_another_question_is_searched_for(searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches.run()
    for options in (
        {"memory_budget": BUDGET + 4096},
        {"stage": 1},
        {"prefetch": 0},
        {"keep_gathered": ("0",)},
        {"machine": "h100-sxm"},
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)},
        {"recompute": "full", "memory_budget": None},
    ):
        assert searches.run(**options)[0] == 1, options
        assert searches.run(**options)[0] == 0, options
    assert len(_kept(tmp_path)) == 8
    monkeypatch.setenv("ZEROFX_DISABLE", "prefetch")
    assert searches.run()[0] == 1


@pytest.mark.days(3)
def test_a_damaged_plan_is_searched_for_anew(searches: Searches, tmp_path: Path) -> None:
    first = searches.run()
    (path,) = _kept(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    again = searches.run()
    assert again[0] == 1 and again[1:3] == first[1:3]
    assert searches.run()[0] == 0


@pytest.mark.days(3)
def test_without_a_search_no_plan_is_kept(searches: Searches, tmp_path: Path) -> None:
    assert searches.run(memory_budget=None)[0] == 1
    assert not _kept(tmp_path)


def test_a_plan_is_not_taken_for_a_step_with_other_kernels(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> int:
        before, model = searches.count, torch.nn.Sequential(Layer(), Layer())
        zerofx.plan(
            model, adamw(model), (torch.randn(64, DIM), torch.randn(64, DIM)), machine="cpu", memory_budget=BUDGET,
            loss_fn=lambda out, x, y: F.mse_loss(out, y),
        )  # fmt: skip
        return searches.count - before

    assert planned() == 1
    monkeypatch.setattr(target, "kernels_in_use", lambda asked, device: frozenset({"loss"}))
    assert [planned() for _ in range(2)] == [1, 0]


def test_how_kernels_are_launched_is_no_other_question(searches: Searches) -> None:
    assert [searches.run(cuda_graphs=asked)[0] for asked in (False, "auto")] == [1, 0]


def test_a_plan_is_not_taken_where_operators_have_other_libraries(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_KERNELS", "none")
    assert searches.run()[0] == 1
    with disable_onednn():
        assert [searches.run()[0] for _ in range(2)] == [1, 0]
    assert searches.run()[0] == 0
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert [searches.run()[0] for _ in range(2)] == [1, 0]


def test_the_number_of_micro_batches_is_chosen_from_what_was_kept(searches: Searches, tmp_path: Path) -> None:
    first = searches.run(accumulate="auto", stage=0, memory_budget=36_000)
    again = searches.run(accumulate="auto", stage=0, memory_budget=36_000)
    assert (first[0] > 1, again[0]) == (True, 0) and len(_kept(tmp_path)) == first[0]
    assert first[1:3] == again[1:3]
    assert Plan.from_json(first[1]).num_micro_batches > 1
    assert all(map(torch.equal, first[3], again[3]))


def _planned(world_size: int, **options: Any) -> zerofx.PlannedStep:
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    batch = (torch.randn(64, DIM), torch.randn(64, DIM))
    return zerofx.plan(
        model, adamw(model), batch, world_size=world_size, machine="cpu", backend="eager",
        loss_fn=lambda out, x, y: F.mse_loss(out, y), **options,
    )  # fmt: skip


def test_plans_without_hardware_are_kept_for_their_number_of_ranks(searches: Searches) -> None:
    first = _planned(2, memory_budget=BUDGET)
    assert searches.count == 1
    assert _planned(2, memory_budget=BUDGET).plan == first.plan
    assert searches.count == 1
    assert _planned(4, memory_budget=BUDGET).plan != first.plan
    assert searches.count == 2


@pytest.mark.days(3)
def test_a_budget_that_nothing_fits_is_refused_from_what_was_kept(searches: Searches) -> None:
    for _ in range(2):
        with pytest.raises(zerofx.MemoryBudgetError, match="least") as refusal:
            _planned(2, memory_budget=1000)
        assert isinstance(refusal.value, BudgetMissedError) and refusal.value.least_bytes > 1000
        assert searches.count == 2  # with whole parameters, and with slices
