"""What a compiled region will hold is near what it does hold, and budgets hold for what is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.budgets import convnet, encoder_decoder, gpt, least_and_most, llama, run
from tests.lib.graphs import Summed, features, prepare
from zerofx.codegen.regions import Region, cut
from zerofx.driver.plan_only import plan
from zerofx.ir.facts import Phase
from zerofx.scheduler.cost.fusion import estimate_memory
from zerofx.scheduler.cost.liveness import apply_profiles, liveness
from zerofx.scheduler.search.problem import BudgetMissedError

# What torch itself deprecates is imported with Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

SCALARS_BYTES = 256  # numbers on the way to a kernel are tensors for a moment
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)  # of what lies between the least possible and keeping everything


def fused_peak(step: Any) -> tuple[int, int]:
    """The peak with fusion, and the one without."""
    live = liveness(step, on_cpu=True)
    regions = [region for region in cut(step) if isinstance(region, Region) and not region.is_update]
    return apply_profiles(live, step, [(r, estimate_memory(r, ())) for r in regions]).peak_bytes, live.peak_bytes


class Pointwise(nn.Module):
    """A chain of which nothing has to be stored inside a layer but what backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (((layer(x) + 1) * 2 - 3) / 4 + 5).abs()
        return x.sum()


def test_a_chain_of_pointwise_operators_takes_no_memory_inside() -> None:
    step = prepare(Pointwise(), features(), num_ranks=1).run().step
    region = next(item for item in cut(step) if isinstance(item, Region) and item.unit == "layers.0")
    taken = [event.num_bytes for event in estimate_memory(region, ()) if event.num_bytes > 0]
    product, kept = 2 * 4 * 4, 2 * 4 * 4
    assert sum(taken) <= product + 2 * kept


def test_of_logits_softmax_and_gradient_one_is_held_when_they_are_fused() -> None:
    ids = torch.randint(512, (4, 65))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    fused, unfused = fused_peak(prepare(GPT(512, 16, 2, 2, 64), batch, num_ranks=1).run().step)
    logits = 4 * 64 * 512 * 4
    assert 1.5 * logits < unfused - fused <= 2 * logits


def test_events_give_back_no_more_than_they_take() -> None:
    step = prepare(Pointwise(), features(), num_ranks=1).run().step
    for region in cut(step):
        if isinstance(region, Region):
            held = 0
            for event in estimate_memory(region, ()):
                held += event.num_bytes
                assert held >= 0


def test_what_another_region_made_is_given_back_with_its_last_reader() -> None:
    step = prepare(Pointwise(), features(), num_ranks=1).run().step
    regions = [region for region in cut(step) if isinstance(region, Region) and region.unit and not region.is_update]
    for region in regions:
        freed = [event.freed for event in estimate_memory(region, ()) if event.freed is not None]
        assert sorted(freed) == list(range(len(region.inputs)))


class Gated(nn.Module):
    """A layer whose backward reads the gradient of one product for two others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 12), nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return found


def test_a_gradient_that_two_loops_of_a_kernel_read_is_written_over_by_one_of_them() -> None:
    step = prepare(Summed(Gated(), Gated()), features(), num_ranks=1).run().step
    regions = [r for r in cut(step) if isinstance(r, Region) and r.unit == "layers.0"]
    backward = next(region for region in regions if region.origin.phase is Phase.BACKWARD)
    taken = [event.num_bytes for event in estimate_memory(backward, ()) if event.num_bytes > 0]
    assert taken.count(2 * 12 * 4) == 2  # of the product, and for one of the factors


@pytest.mark.slow
def test_the_estimate_is_near_what_compiled_regions_hold() -> None:
    torch.manual_seed(0)
    model = GPT(512, 64, 2, 2, 64)
    ids = torch.randint(512, (4, 65))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    planned = zerofx.plan(model, torch.optim.AdamW(model.parameters()), batch, machine="cpu")
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), machine="cpu", example_batch=batch)
    estimated, measured = planned.plan.peak_bytes["device"], step.measure(*batch).peak_bytes["device"]
    assert estimated == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, llama, encoder_decoder, convnet])
def test_predicted_is_measured_at_every_budget_on_the_eager_backend(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    least, most = least_and_most(model, batch)
    peaks = []
    for share in SHARES:
        budget = least + int(share * (most - least))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = zerofx.compile(model, optimizer, machine="cpu", backend="eager", memory_budget=budget)
        run(step, batch)
        found = step.measure(**batch) if isinstance(batch, dict) else step.measure(*batch)
        measured, predicted = found.peak_bytes["device"], step.plan.peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.01)
        assert measured <= budget + SCALARS_BYTES
        peaks.append(predicted)
        step.close()
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, llama, encoder_decoder, convnet])
def test_predicted_is_measured_within_3_percent_when_compiled(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    least, most = least_and_most(model, batch, backend="inductor")
    least = least_when_compiled(model, batch, least)
    peaks, num_estimated = [], 0
    for share in SHARES:
        budget = least + int(share * (most - least))
        optimizer = torch.optim.AdamW(model.parameters())
        planned = plan(model, optimizer, batch, machine="cpu", memory_budget=budget).plan
        step = zerofx.compile(model, optimizer, machine="cpu", memory_budget=budget)
        run(step, batch)
        found = step.measure(**batch) if isinstance(batch, dict) else step.measure(*batch)
        measured, predicted = found.peak_bytes["device"], step.plan.peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.03)
        # A plan that turned out too tight once its regions were compiled was made again.
        if planned.decisions_hash() == step.plan.decisions_hash():
            assert measured == pytest.approx(planned.peak_bytes["device"], rel=0.03)
            num_estimated += 1
        assert measured <= budget + SCALARS_BYTES
        peaks.append(predicted)
        step.close()
    assert peaks == sorted(peaks, reverse=True)
    assert num_estimated >= len(SHARES) // 2


def least_when_compiled(model: nn.Module, batch: Any, estimated: int) -> int:
    """The least budget that compiled regions keep to: what they are estimated to need, or else what they were found to
    need, which is within 3 %."""
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), machine="cpu", memory_budget=estimated)
    found = estimated
    try:
        run(step, batch)
    except BudgetMissedError as missed:
        found = missed.least_bytes
    finally:
        step.close()
    assert found <= 1.03 * estimated
    return found
