"""Updates of flat buffers give the bits of the real optimizers, whatever changes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.optimizers import CASES, FUSED_CASES, CountingAdam, Runner, compare, program_of
from zerofx.errors import OptimizerError
from zerofx.optimizers import ShadowOptimizer, StandIn, check_supported, has_fused, scalar_state_names, shadow_optimizer


class Eager(torch.optim.Optimizer):
    """Makes its states when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.full_like(p, 0.5), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] += 1
            state["sum"].addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, state["sum"].sqrt(), value=-self.param_groups[0]["lr"] / state["step"].item())


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", CASES)
def test_bits_agree_with_the_optimizer(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_bits_agree_in_bfloat16(name: str) -> None:
    compare(CASES[name], dtype=torch.bfloat16)


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", CASES)
def test_bits_agree_when_hyperparameters_change_branches(name: str) -> None:
    def change(group: dict[str, Any], step: int) -> None:
        if "weight_decay" in group and step in (4, 9):
            group["weight_decay"] = 0.0 if group["weight_decay"] else 0.2
        if "betas" in group and step == 6:
            group["betas"] = (0.8, 0.9)

    compare(CASES[name], change=change)


@pytest.mark.parametrize("name", FUSED_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_bits_agree_with_the_fused_optimizer(name: str, dtype: torch.dtype) -> None:
    if not has_fused(CASES[name]([param()]), "cpu", dtype):
        pytest.skip("torch's kernel is wrong for this dtype")
    program = compare(CASES[name], fused=True, dtype=dtype).programs[-1]
    assert [spec.name for spec in program.tensor_scalars] == ([] if name.startswith("sgd") else ["step"])


def test_momentum_switched_on_and_off_keeps_the_buffer() -> None:
    def change(group: dict[str, Any], step: int) -> None:
        group["momentum"] = {0: 0.0, 3: 0.9, 6: 0.0, 9: 0.8}.get(step, group["momentum"])

    runner = compare(CASES["sgd"], change=change)
    assert runner.present == {"momentum_buffer"}


def test_radam_has_a_form_a_side_of_its_switch() -> None:
    assert len(compare(CASES["radam"]).programs) == 2


def test_adamw_has_one_form() -> None:
    assert len(compare(CASES["adamw"]).programs) == 1


def test_tensors_among_the_hyperparameters_are_read_by_fused_kernels_as_numbers() -> None:
    lr = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW([param()], lr=lr, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
    shadow, stand_in = ShadowOptimizer(optimizer), StandIn(0, torch.float32, fused=True)
    numbers = []
    for value in (0.01, 0.5):
        lr.fill_(value)
        numbers.append(shadow.next_step([stand_in]).updates[stand_in.key].numbers)
    assert [(a, b) for a, b in zip(*numbers, strict=True) if a != b] == [(pytest.approx(0.01), 0.5)]
    assert optimizer.param_groups[0]["lr"] is lr


def test_resumed_state_decides_the_branch() -> None:
    optimizer = torch.optim.RAdam([param()])
    shadow = ShadowOptimizer(optimizer)
    flat = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
    starts = [StandIn(0, torch.float32, flat, (("step", torch.tensor(count)),)) for count in (1.0, 100.0)]
    early, late = (shadow.programs([start])[start.key] for start in starts)
    assert early.text != late.text
    assert early.text == program_of(optimizer).text


def test_hooks_and_schedulers_do_not_fire_and_nothing_is_stepped() -> None:
    p = param()
    optimizer = torch.optim.AdamW([p])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = p.detach().clone()
    program_of(optimizer)
    assert not calls and not optimizer.state and torch.equal(p, before)
    assert scheduler.last_epoch == 0


def test_programs_of_equal_updates_are_one() -> None:
    groups = [{"params": [param()], "lr": 1e-3}, {"params": [param()], "lr": 1e-4}]
    programs = ShadowOptimizer(torch.optim.AdamW(groups)).programs([StandIn(i, torch.float32) for i in range(2)])
    assert len(programs) == 2 and len(set(map(id, programs.values()))) == 1


def test_initial_values() -> None:
    adagrad = torch.optim.Adagrad([param()], initial_accumulator_value=0.25)
    check_supported(adagrad)
    counting = CountingAdam([param()])
    (spec,) = program_of(counting).states
    assert (spec.name, spec.written_first) == ("square", True)
    spec = program_of(torch.optim.AdamW([param()])).states[0]
    assert (spec.name, spec.initial, spec.written_first) == ("exp_avg", 0.0, False)
    rprop = program_of(torch.optim.Rprop([param()]))
    assert [s.name for s in rprop.states if s.written_first] == ["step_size"]


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("adamw", True), ("sgd_momentum", True), *((name, False) for name in (
            "adamw_amsgrad", "sgd_nesterov", "nadam", "radam", "rprop", "asgd_averaging", "lion", "counting_adam"
        ))
    ],
)  # fmt: skip
def test_a_step_is_recorded_once_and_repeated_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, fused: bool
) -> None:
    runner, grad = Runner(CASES[name]([param()]), torch.linspace(-1, 1, 5), fused=fused), torch.linspace(1, -2, 5)
    for _ in range(8):
        runner.step(grad.clone())
    monkeypatch.setattr(shadow_optimizer, "StandInStep", None)
    for _ in range(3):
        runner.optimizer.param_groups[0]["lr"] *= 0.9
        runner.step(grad.clone())


def test_numbers_that_cannot_be_told_apart_are_heard_by_recording_each_step() -> None:
    """Two numbers of one call are equal and have no names: which is which shows only where it is recorded."""

    class Clamped(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "low": 0.0, "high": 0.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            group = self.param_groups[0]
            for p in group["params"]:
                p.sub_(torch.clamp(p.grad, group["low"], group["high"]), alpha=group["lr"])

    def change(group: dict[str, Any], step: int) -> None:
        group["low"], group["high"] = (0.0, 0.0) if step < 2 else (-0.1 * step, 0.2 * step)

    compare(Clamped, change=change)


def test_a_number_that_changes_its_type_or_what_it_is_made_of_is_heard_as_it_is() -> None:
    def change(group: dict[str, Any], step: int) -> None:
        group["lr"] = {3: 1, 5: 0.25, 7: torch.tensor(0.1)}.get(step, group["lr"])

    compare(CASES["lion"], change=change)


def test_state_made_by_the_constructor() -> None:
    check_supported(Eager([param()]))
    with pytest.raises(OptimizerError, match="KeyError"):
        program_of(Eager([param()]))  # without what the constructor has made


def test_states_of_0_dim_parameters_are_told_apart_by_what_the_update_makes() -> None:
    temperature = torch.nn.Parameter(torch.tensor(1.0))
    adam = torch.optim.Adam([temperature])
    temperature.grad = torch.tensor(2.0)
    adam.step()
    assert scalar_state_names(adam, 0, dtype=torch.float32) == {"step"}
    assert scalar_state_names(Eager([temperature, param()]), 0, dtype=torch.float32) == {"step"}
    check_supported(Eager([temperature]))  # tried with the states that its constructor makes


def test_has_fused_is_for_the_very_class() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert has_fused(torch.optim.AdamW([param()]), "cpu", torch.float32)
    assert not has_fused(Mine([param()]), "cpu", torch.float32)
    assert not has_fused(torch.optim.RMSprop([param()]), "cpu", torch.float32)
    assert not has_fused(torch.optim.AdamW([param()]), "meta", torch.float32)
    assert not has_fused(torch.optim.SGD([param()]), "cpu", torch.bfloat16)
    assert has_fused(torch.optim.SGD([param()]), "cuda", torch.bfloat16)


def test_low_precision_fused_sgd_is_for_other_devices() -> None:
    program = program_of(torch.optim.SGD([param()], lr=0.1, momentum=0.9), dtype=torch.bfloat16, fused=True)
    assert [s.dtype for s in program.states] == [torch.bfloat16]


def test_fused_stays_close_to_the_single_tensor_update() -> None:
    results = []
    for fused in (False, True):
        runner = Runner(torch.optim.AdamW([param()]), torch.linspace(-1, 1, 37), fused=fused)
        for step in range(5):
            runner.step(torch.linspace(1, -1, 37) * (step + 1))
        results.append(runner.param)
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-6)
