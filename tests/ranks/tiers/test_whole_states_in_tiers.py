"""States of whole parameters on the host or a drive, of optimizers that combine parameters too: the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.offloads import check_measured
from tests.lib.runs.whole_optimizers import ByAllNorms
from tests.lib.runs.whole_updates import WholeCase, compiled, differences_of
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("drive", "verified")

BASE = WholeCase("by all norms, layers", {"stage": 3, "recompute": "none"}, rows=64)
LOW: dict[str, Any] = {"precision": zerofx.Precision(state_dtype="bf16")}
SUMMED: dict[str, Any] = {"accumulate": 4, "reduce": "once"}


def _away(case: WholeCase, tier: str, num_bytes: int) -> WholeCase:
    """A case that has ``num_bytes`` fewer than it would take without a budget, and may use ``tier``."""
    free, _ = compiled(case)
    free.prepare(case.batches(1)[0][0])
    budget = free.plan.peak_bytes["device"] - num_bytes
    free.close()
    return replace(case, options={**case.options, "offload": tier, "memory_budget": budget})


def _differences(name: str, tier: str, options: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """What is not as in plain training, and the tiers that states of the optimizer that combines parameters are in."""
    # As many rows a micro-batch as without: the peak is in backward, where states may be away, and not in the update.
    rows = BASE.rows * options.get("accumulate", 1)
    case = _away(replace(BASE, name=name, rows=rows, options={**BASE.options, **options}), tier, 400)
    step, _ = compiled(case)
    step.prepare(case.batches(1)[0][0])
    tiers = {f"{decision.tier}, {decision.update}" for decision in step.plan.states}
    step.close()
    return differences_of(case), tiers


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", ["by all norms, layers", "Muon"])
@pytest.mark.parametrize("options", [{}, SUMMED, LOW], ids=["plain", "accumulate", "state_dtype"])
def test_bits_are_those_of_states_on_the_device(
    num_ranks: int, tier: str, name: str, options: Mapping[str, Any]
) -> None:
    for wrong, tiers in run_ranks(_differences, num_ranks, name, tier, options):
        assert wrong == [] and tiers <= {f"{tier}, device"}


@pytest.mark.days(3)
def test_states_that_one_update_needs_come_up_for_it_and_go_down_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    rows, size = torch.randn(256, 128), 4 * 128 * 128

    def step_with(plan: Plan | None) -> zerofx.Step:
        optimizer = ByAllNorms(model.parameters(), lr=1e-3)
        step = zerofx.compile(model, optimizer, loss_fn=_mean_square, backend="eager", plan=plan)
        step(rows)
        return step

    step = step_with(None)
    free = step.plan
    step.close()
    states = (Absence(kind="states", bucket=bucket, tier="host", reason="by hand") for bucket in range(4))
    step = step_with(replace(free.replace_absences(states=states), prediction=None))
    check_measured(step.measure(rows, num_steps=2), step.plan, 8192)
    assert step.tiers()["host"] == 4 * size
    assert step.plan.link_bytes == {"to_host": 4 * size, "to_device": 4 * size}
    order = [row.op.rpartition(".")[2] for row in step.schedule().rows if str(row.phase) == "update"]
    assert order.count("update_whole") == 1
    step.close()


def _mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


class Model(nn.Module):
    """Matrices for Muon, and biases for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + x.sum()


def _optimizers(model: Model) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, foreach=False)]


def _new_model() -> Model:
    torch.manual_seed(3)
    return Model()


def _delayed_differences(stage: int) -> list[str]:
    """What delayed training does otherwise than by hand: matrices are exact, and biases lag by one step."""
    used, updated, model = _new_model(), _new_model(), _new_model()
    by_hand = _optimizers(updated)
    step = zerofx.compile(model, _optimizers(model), stage=stage, backend="eager", delayed_update=1)
    wrong, lagging = list[str](), dict[str, torch.Tensor]()
    for number in range(1, 6):
        rows = torch.randn(8, 10, generator=torch.Generator().manual_seed(number))
        now = {name: value.clone() for name, value in updated.state_dict().items()}
        used.load_state_dict(now | (lagging if number > 2 else {}))
        lagging = {name: value for name, value in now.items() if "bias" in name}
        used.zero_grad()
        loss = used(rows)
        loss.backward()
        for mine, theirs in zip(updated.parameters(), used.parameters(), strict=True):
            mine.grad = theirs.grad
        for optimizer in by_hand:
            optimizer.step()
        if not torch.equal(step(rows), loss):
            wrong.append(f"loss {number}")
    found = step.full_state_dict()
    wrong += [name for name, value in updated.state_dict().items() if not torch.equal(value, found[name])]
    kinds = {(decision.tier, decision.update, decision.delayed) for decision in step.plan.states}
    assert kinds == {("host", "device", False), ("host", "host", True)}
    step.close()
    return wrong


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 3)])
def test_whole_parameters_are_updated_in_their_own_step_where_others_are_delayed(num_ranks: int, stage: int) -> None:
    assert run_ranks(_delayed_differences, num_ranks, stage) == [[]] * num_ranks


@pytest.mark.parametrize("name", ["Muon, groups", "by all norms, layers"])
def test_a_delay_of_nothing_is_told_and_has_states_on_the_host(name: str) -> None:
    case = WholeCase(name, {"delayed_update": 1})
    step, _ = compiled(case)
    with pytest.warns(UserWarning, match="delayed_update delays no update here"):
        step.prepare(case.batches(1)[0][0])
    assert {(decision.tier, decision.update) for decision in step.plan.states} == {("host", "device")}
    given = WholeCase(name, {"delayed_update": 1, "plan": step.plan})
    step.close()
    with pytest.warns(UserWarning, match="delayed_update delays no update here"):
        assert differences_of(given) == []
