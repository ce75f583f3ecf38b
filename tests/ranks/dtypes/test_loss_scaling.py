"""Training in float16 with a scaled loss: what ``torch.amp.GradScaler`` does, at every stage and with every plan."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.budgets import small_machine
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.offloads import check_measured, placing, prepare_case
from tests.lib.runs.scaling import Spiky, spiky_batches, train_by_hand, train_scaled, unlike
from tests.lib.runs.training import build, plan_of, step_of
from zerofx import LossScale, Precision, UsageError

pytestmark = pytest.mark.usefixtures("drive")

ROUNDING = 1e-5  # sums of squares are taken in other orders


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "stage"), [("gpt", 0), ("gpt", 3), ("stack", 3), ("tied", 3), ("param groups", 0)])
def test_one_process_trains_as_with_a_grad_scaler(name: str, stage: int) -> None:
    expected = train_by_hand(name, 8, scaling={})
    assert expected.skipped == [0] and expected.scales[-1] == 32768.0  # float16 has no 65536
    assert unlike(expected, train_scaled(name, stage, 8, loss_scale=None)) == []


def _long_runs(stages: list[int]) -> list[str]:
    expected = train_by_hand("spiky", 200)
    assert len(expected.skipped) > 20 and len(set(expected.scales)) > 5
    return [
        f"stage {stage}: {text}" for stage in stages for text in unlike(expected, train_scaled("spiky", stage, 200))
    ]


def _four_ranks() -> list[str]:
    """What differs between stages, to the bit, and from training by hand: there gradients are divided by four before
    their sum is taken, and gloo has an order of its own. In float16 losses of 60 steps differ by some hundredths."""
    expected = train_by_hand("spiky", 60)
    first, *others = (train_scaled("spiky", stage, 60) for stage in range(4))
    assert len(first.skipped) > 5
    return [*unlike(expected, first, 0.1), *(text for other in others for text in unlike(first, other))]


def test_scales_skipped_steps_and_bits_are_grad_scalers_over_200_steps_with_planted_infs() -> None:
    assert _long_runs([0, 3]) == []


@pytest.mark.parametrize("stages", [[0, 3], pytest.param([1, 2], marks=pytest.mark.slow)], ids=str)
def test_two_ranks_skip_what_one_of_them_cannot_do_at_all_stages(stages: list[int]) -> None:
    assert run_ranks(_long_runs, 2, stages) == [[], []]


@pytest.mark.slow
def test_four_ranks_skip_what_one_of_them_cannot_do() -> None:
    assert run_ranks(_four_ranks, 4) == [[]] * 4


@pytest.mark.parametrize(
    "scaling", [{"init_scale": 30001.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}]
)
def test_scales_that_are_no_powers_of_two_are_grad_scalers_too(scaling: dict[str, Any]) -> None:
    expected = train_by_hand("spiky", 60, scaling=scaling)
    assert unlike(expected, train_scaled("spiky", 3, 60, loss_scale=LossScale(**scaling))) == []


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_are_scaled_alike_and_looked_at_together(accumulate: int) -> None:
    expected = train_by_hand("stack", 6, accumulate=accumulate, scaling={})
    assert unlike(expected, train_scaled("stack", 3, 6, accumulate=accumulate, loss_scale=None)) == []


def _each_on_ranks() -> list[str]:
    options: dict[str, Any] = {"accumulate": 4, "reduce": "each", "loss_scale": None, "max_grad_norm": 1e6}
    first, other = (train_scaled("stack", stage, 4, **options) for stage in (1, 3))
    once = train_by_hand("stack", 4, accumulate=4, scaling={})
    assert first.skipped == once.skipped == [0]
    return unlike(first, other)


def test_slices_of_each_micro_batch_are_unscaled_together() -> None:
    assert run_ranks(_each_on_ranks, 2) == [[], []]


@pytest.mark.parametrize("name", ["stack", "spiky"])
def test_gradients_are_unscaled_and_then_clipped(name: str) -> None:
    expected = train_by_hand(name, 1, max_grad_norm=0.01)
    assert max(expected.trained.norms) > 0.01
    assert unlike(expected, train_scaled(name, 3, 1, max_grad_norm=0.01), ROUNDING) == []
    far = train_scaled(name, 3, 12, max_grad_norm=1e6)
    plain = train_by_hand(name, 12, max_grad_norm=1e6)
    without, found = (replace(each, trained=replace(each.trained, norms=[])) for each in (plain, far))
    assert unlike(without, found) == []
    assert torch.stack(far.trained.norms).tolist() == pytest.approx(
        torch.stack(plain.trained.norms).tolist(), rel=ROUNDING
    )


@pytest.mark.days(3)
def test_autocast_in_float16_with_a_scaled_loss_is_torchs_recipe() -> None:
    expected = train_by_hand("spiky", 30, low=None, scaling={"init_scale": 2.0**30, "growth_interval": 4})
    scale = LossScale(2.0**30, growth_interval=4)
    found = train_scaled("spiky", 3, 30, precision=None, loss_scale=scale)
    assert 3 < len(expected.skipped) < 27
    assert unlike(expected, found) == []


class Large(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_large_gradients_that_are_finite_are_no_overflow() -> None:
    for clip in (None, 1.0):
        model = Large()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        step = zerofx.compile(
            model, optimizer, backend="eager", precision=Precision(loss_scale=1.0), max_grad_norm=clip
        )
        step(torch.full((4,), 1e25))  # the square is beyond float32
        assert (step.num_steps, step.num_skipped) == (1, 0), clip


# ----------------------------------------------------------------------------------- a step that is skipped


class _Counting(nn.Module):
    """A spiky model with a buffer that counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Spiky()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        self.calls.add_(1)
        loss: Tensor = self.inner(x, spike)
        return loss


def _extras(model: nn.Module, x: Tensor, spike: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(x, spike)
    return loss, {"twice": loss.detach() * 2}


def _state_of(step: zerofx.Step) -> dict[str, Any]:
    return {"model": step.full_state_dict(), "optimizer": step.optimizer.state_dict()["state"]}


def test_a_step_that_is_left_out_gives_all_it_has_and_changes_no_bit() -> None:
    model = _Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = zerofx.compile(
        model,
        optimizer,
        3,
        backend="eager",
        precision=Precision("fp16", loss_scale=LossScale(4096.0)),
        forward=_extras,
        max_grad_norm=1.0,
    )
    x, calm, spike = torch.randn(4, 6), torch.zeros(()), torch.tensor(6e4)
    step(x, calm)
    before, expected = _state_of(step), model
    loss, extras = step(x, spike)
    schedule.step()  # says nothing of a step that was not done
    after = _state_of(step)
    assert (step.num_steps, step.num_skipped, step.loss_scale) == (1, 1, 2048.0)
    assert before["model"].pop("calls") == 1 and after["model"].pop("calls") == 2
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert loss.dtype is torch.float16 and loss.isfinite() and torch.equal(extras["twice"], loss * 2)
    with step.full_parameters():
        assert torch.equal(expected.half()(x.half(), calm.half()), loss)  # that of the parameters before it
    assert not step.grad_norm.isfinite()


@pytest.mark.parametrize("accumulate", [3, 5])
def test_a_step_of_micro_batches_that_is_left_out_gives_what_each_has(accumulate: int) -> None:
    def forward(model: nn.Module, x: Tensor, spikes: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x, spikes[0])
        return loss, loss.detach() * 2

    model = Spiky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = zerofx.compile(
        model, optimizer, 0, backend="eager", forward=forward, accumulate=accumulate,
        precision=Precision("fp16", loss_scale=LossScale(4096.0)),
    )  # fmt: skip
    x = torch.randn(30, 6)
    (calm, each), (skipped, each_skipped) = (step(x, torch.full((30,), spike)) for spike in (0.0, 6e4))
    assert step.num_skipped == 1 and len(each) == accumulate
    assert torch.equal(calm, skipped) and torch.equal(torch.stack(each), torch.stack(each_skipped))


def test_a_scale_below_one_says_that_no_scale_will_do() -> None:
    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zerofx.compile(model, optimizer, backend="eager", precision=Precision(loss_scale=LossScale(1.0)))
    with pytest.warns(zerofx.ZeroFXWarning, match="expected gradients that are finite at some scale of the loss"):
        step(torch.full((4,), math.inf))


def test_a_fixed_scale_stays_and_skips_all_the_same() -> None:
    fixed = train_scaled("spiky", 0, 20, loss_scale=1024.0)
    assert set(fixed.scales) == {1024.0} and fixed.skipped == train_by_hand("spiky", 20).skipped[:1] + fixed.skipped[1:]


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_left_out_as_any_other(worst: float) -> None:
    def run(**options: Any) -> zerofx.Step:
        model = Spiky()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = Precision("fp16", loss_scale=LossScale(8.0))
        step = zerofx.compile(model, optimizer, backend="eager", precision=precision, **options)
        assert not step(torch.full((4, 6), worst), torch.zeros(())).isfinite()
        return step

    with pytest.warns(zerofx.ZeroFXWarning, match="expected a finite loss"):
        skipping = run(on_nonfinite="skip")
    plain = run()
    for step in (skipping, plain):
        assert (step.num_steps, step.num_skipped, step.loss_scale) == (0, 1, 4.0)


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "update"), [("host", "host"), ("host", "device"), ("nvme", "host")])
def test_states_elsewhere_are_the_same_to_the_bit_and_take_the_bytes_predicted(tier: str, update: str) -> None:
    case = CASES["stack"]
    kept = train_scaled("stack", 3, 4, loss_scale=None)
    prepared = prepare_case(case, 3, 1, precision="fp16", loss_scaled=True)
    plan = placing(prepared, tier, update)
    assert unlike(kept, train_scaled("stack", 3, 4, loss_scale=None, plan=plan)) == []
    step, args = step_of("stack", 3, precision="fp16", plan=plan)
    check_measured(step.measure(*args), step.plan, sum(given.nbytes for given in args))
    assert step.num_skipped == 1 and step.num_steps == 3  # the first is left out, and not measured


def test_the_peak_and_what_is_sent_are_predicted() -> None:
    for options in ({"accumulate": 2, "recompute": "full"}, {"max_grad_norm": 1.0}):
        step, args = step_of("gpt", 3, precision="fp16", **options)
        measured, predicted = step.measure(*args).peak_bytes["device"], step.plan.peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.01), options
    bf16, fp16, clipped = (
        planned(world_size=4, **options).plan.wire_bytes
        for options in ({"precision": "bf16"}, {"precision": "fp16"}, {"precision": "fp16", "max_grad_norm": 1.0})
    )
    assert fp16 - bf16 == clipped - bf16 == 8 * 3


def test_a_budget_is_met() -> None:
    options: dict[str, Any] = {"machine": small_machine(1e9), "recompute": "none", "precision": "fp16"}
    free, args = step_of("gpt", 3, **options)
    expected = [free(*args) for _ in range(3)]
    step, _ = step_of("gpt", 3, memory_budget=int(0.75 * free.plan.peak_bytes["device"]), offload="host", **options)
    assert all(torch.equal(step(*args), loss) for loss in expected) and step.plan.states


def _on_ranks(drive: str) -> list[str]:
    """What differs between stage 0 and others, with states in places and few bits on the wire."""
    os.environ["ZEROFX_NVME_DIR"] = drive
    kept = train_scaled("stack", 0, 4, loss_scale=None, max_grad_norm=0.5)
    plan = placing(prepare_case(CASES["stack"], 2, 2, precision="fp16", loss_scaled=True), "host", "host")
    plan = replace(plan, max_grad_norm=0.5)
    wrong = unlike(kept, train_scaled("stack", 2, 4, loss_scale=None, max_grad_norm=0.5, plan=plan))
    quantised = train_scaled("spiky", 3, 40, wire="int8")
    assert quantised.skipped == train_by_hand("spiky", 40).skipped
    return wrong


@pytest.mark.days(3)
def test_two_ranks_have_the_bits_of_stage_0_with_states_elsewhere(drive: object) -> None:
    assert run_ranks(_on_ranks, 2, str(drive)) == [[], []]


planned = partial(plan_of, "stack")


def test_a_plan_says_that_the_loss_is_scaled_and_is_for_nothing_else() -> None:
    free, plan = planned(precision="bf16").plan, planned(precision="fp16").plan
    assert "fp16, loss scaled" in str(plan) and "scaled" not in str(free)
    assert zerofx.Plan.from_json(plan.to_json()) == plan and "loss_scaled" not in free.to_json()
    assert "loss: as it is -> scaled" in free.diff(plan)
    case = CASES["stack"]
    model, scaled = build(case), Precision(loss_scale=1.0)
    with pytest.raises(zerofx.PlanError, match="loss: expected as it is, found scaled"):
        zerofx.compile(
            model, case.optimizer(model), plan=planned().plan, machine="cpu", precision=scaled, backend="eager"
        )


def test_tune_runs_plans_at_a_scale_with_which_none_is_left_out() -> None:
    model = Spiky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, _),) = spiky_batches(1, 0, 1)
    found = zerofx.tune(
        model, optimizer, (x, torch.zeros(())), precision="fp16", backend="eager", num_candidates=1, num_steps=2
    )
    assert found.plan.loss_scaled


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "wrong",
    [0, -1.0, math.nan, math.inf, True, "dynamic", LossScale(0.0), LossScale(growth_factor=0.5),
     LossScale(backoff_factor=1.5), LossScale(growth_interval=0), torch.tensor(1.0)],
)  # fmt: skip
def test_what_is_no_scale_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected loss_scale to be a finite number above 0, or a LossScale"):
        Precision(loss_scale=wrong)


def test_parameters_in_float16_are_refused_as_grad_scaler_refuses_them() -> None:
    model, scaled = Spiky().half(), Precision(loss_scale=1.0)
    with pytest.raises(UsageError, match="expected parameters that are stored in float32 where the loss is scaled"):
        zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", precision=scaled)


def test_a_step_whose_loss_is_not_scaled_has_no_scale() -> None:
    model = Spiky()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    with pytest.raises(UsageError, match="expected precision='fp16' or a loss_scale to be given"):
        _ = step.loss_scale


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as Inductor is imported
@pytest.mark.slow
def test_compiled_regions_skip_the_same_steps() -> None:
    expected = train_by_hand("spiky", 60)
    found = train_scaled("spiky", 3, 60, backend="inductor")
    assert found.scales == expected.scales and found.skipped == expected.skipped
    assert unlike(expected, found, 1e-2) == []
